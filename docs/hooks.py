"""What mkdocs needs beyond the pages of docs/: those of the repository's root, the reference, links between them."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
LINK = re.compile(r"(!?\[[^\]]*\])\(([^)\s#:]+)(#[^)\s]*)?\)")
EXAMPLE = re.compile(r"^(>>> .*?)(?=\n\n|\Z)", re.MULTILINE | re.DOTALL)

# Pages of the repository that lie elsewhere on the site.
MOVED = {
    **{ROOT / name: name for name in ("CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md")},
    **{path: f"results/{path.name}" for path in (ROOT / "results").glob("*.svg")},
    ROOT / "README.md": "index.md",
}
ORIGIN = {uri: path for path, uri in MOVED.items()}

TORCHS = {"add_param_group", "load_state_dict", "state_dict", "step", "zero_grad"}  # described in torch.optim.Optimizer

# The reference: every public name, once.
REFERENCE = {
    "symmetry": (
        "Symmetry: find it and use it",
        "gspace",
        """analyze Analysis UnitGroup Edges Pin TraceError
        rescale_ random_scales Scales balance_ are_equivalent Equivalence""",
    ),
    "optimizers": (
        "Optimizers",
        "gspace",
        "GSGD InGSpace factory init_skeleton_ build_skeleton Skeleton PathSGD FrozenSkeletonSGD",
    ),
    "measures": (
        "Norms and measures",
        "gspace",
        """path_norm basis_path_norm BasisPathPenalty PathError
        invariance_gap compare_invariance balancedness distance psi_flatness RatioStatistics""",
    ),
    "quantization": (
        "Quantization",
        "gspace.quantization",
        "mappings Mapping Mappings Side check_mappings effects equalize_ smooth_ awq smoothquant",
    ),
    "paths": (
        "Paths of small networks, written out",
        "gspace.paths",
        """Wiring wire Path enumerate_paths count_paths structure_matrix rank Basis basis_paths path_values
        activation_status combine as_function jacobian odot reference_values skeleton_products weights_of
        inverse_chain_rule allocate_weights dense_step autograd_step""",
    ),
}

# What an optimizer has of the class that GSGD and InGSpace share.
SHARED = "\n    options: {inherited_members: [rechoose, statistics]}"
STORY = "::: {}\n    options: {{members: false, show_root_heading: false}}"  # what a module says of itself


def on_files(files: Files, config: Any) -> Files:
    """Adds the pages that docs/ does not hold."""
    for path, uri in MOVED.items():
        files.append(File.generated(config, uri, abs_src_path=str(path)))
    check(griffe.load("gspace", search_paths=[ROOT / "src"]))
    for name, (title, module, names) in REFERENCE.items():
        told = [STORY.format(module)] if module != "gspace" else []
        shown = (f"::: {module}.{listed}{SHARED * (listed in ('GSGD', 'InGSpace'))}" for listed in names.split())
        body = "\n\n".join([*told, *shown])
        files.append(File.generated(config, f"reference/{name}.md", content=f"# {title}\n\n{body}\n"))
    return files


def on_page_markdown(text: str, page: Any, **_: Any) -> str:
    """Links as they are right in the repository, made right on the site; what is not on it is only named."""
    uri = page.file.src_uri
    folder = ORIGIN.get(uri, DOCS / uri).parent

    def moved(found: re.Match[str]) -> str:
        target = (folder / found[2]).resolve()
        inside = target.relative_to(DOCS).as_posix() if target.is_relative_to(DOCS) else None
        there = MOVED.get(target, inside)
        if there is None and target.exists() and found[1][0] == "[":
            text, place = found[1][1:-1], f"`{target.relative_to(ROOT).as_posix()}`"
            return place if text.strip("/") == target.name else f"{text} ({place})"
        return f"{found[1]}({os.path.relpath(there or found[2], Path(uri).parent)}{found[3] or ''})"

    return LINK.sub(moved, text)


class Doctests(griffe.Extension):
    """Examples in docstrings become blocks of code."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = EXAMPLE.sub(r"```pycon\n\1\n```", obj.docstring.value)


def check(package: Any) -> None:
    """An error for a public name that the reference lacks, or that says nothing of itself."""
    public = {f"gspace.{name}" for name in package.exports} - {"gspace.paths"}
    public |= {f"gspace.{part}.{name}" for part in ("paths", "quantization") for name in package[part].exports}
    listed = {f"{module}.{name}" for _, module, names in REFERENCE.values() for name in names.split()}
    shown = {name.replace("gspace.quantization.", "gspace.") for name in listed} | listed
    problems = [f"{name} is public and on no page of the reference" for name in sorted(public - shown)]
    problems += [f"{name} is not public, but on a page of the reference" for name in sorted(listed - public)]
    for name in sorted(listed & public):
        problems += [f"{which} has no docstring" for which in silent(package[name.removeprefix("gspace.")], name)]
    if problems:
        raise PluginError("\n".join(problems))


def silent(item: Any, name: str) -> Iterator[str]:
    """Names without a docstring: this, and the public functions and properties that it defines itself."""
    if not item.has_docstring:
        yield name
    for key, member in item.members.items() if item.is_class else ():
        public = not key.startswith("_") and key not in TORCHS
        if public and (member.is_function or "property" in member.labels) and not member.has_docstring:
            yield f"{name}.{key}"
