"""Processes that stay, for many tests: each call runs a function on every rank and brings back what it returns.

To start two processes takes as long as most of what is asked of them. They look to frameworks as if torchrun had
started them: the same variables, and a group that exists already.
"""

import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp

import vision

SECONDS = 120  # for one call: a collective that not all ranks enter would wait for ever
PATIENCE = 10  # seconds for all others, when one has raised


class RankError(RuntimeError):
    """What ranks raised: `errors` has a text for each, empty where none was."""

    def __init__(self, errors: list[str]) -> None:
        super().__init__("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(errors) if text))
        self.errors = errors


class Ranks:
    """So many processes in one group with gloo."""

    def __init__(self, size: int, path: list[str]) -> None:
        self.size, self.path = size, path
        self.pipes: list[Any] = []
        self.processes: list[Any] = []

    def _start(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        context = mp.get_context("spawn")
        pipes = [context.Pipe() for _ in range(self.size)]
        self.pipes = [mine for mine, _ in pipes]
        self.processes = [
            context.Process(target=_serve, args=(rank, self.size, port, self.path, theirs), daemon=True)
            for rank, (_, theirs) in enumerate(pipes)
        ]
        for process in self.processes:
            process.start()

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """`function(*args)` on every rank; what each returned.

        Raises:
            RankError: Any of them has raised, or did not answer. Then the next call starts other processes.
        """
        if not self.processes:
            self._start()
        for pipe in self.pipes:
            pipe.send((function, args))
        answers: dict[int, tuple[Any, str]] = {}
        end = time.monotonic() + SECONDS
        while len(answers) < self.size and time.monotonic() < end:
            waiting = [pipe for rank, pipe in enumerate(self.pipes) if rank not in answers]
            for pipe in wait(waiting, timeout=1):
                rank = self.pipes.index(pipe)
                answers[rank] = pipe.recv()
                if answers[rank][1]:  # others may wait for it
                    end = min(end, time.monotonic() + PATIENCE)
        errors = [answers[rank][1] if rank in answers else "no answer" for rank in range(self.size)]
        if len(answers) < self.size:
            self.close()
        if any(errors):
            raise RankError(errors)
        return [answers[rank][0] for rank in range(self.size)]

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.processes = []


def _serve(rank: int, size: int, port: int, path: list[str], pipe: Connection) -> None:
    sys.path[:] = path
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "GROUP_RANK": 0}
    names |= {"ROLE_RANK": rank, "ROLE_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    torchruns = {key: str(value) for key, value in names.items()} | {"TORCHELASTIC_RUN_ID": "tests"}
    os.environ.update(torchruns, OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    vision.declare()
    while True:
        function, args = pipe.recv()
        try:
            os.environ.update(torchruns)  # frameworks tidy up after themselves
            torch.manual_seed(0)
            pipe.send((function(*args), ""))
        except Exception as error:  # noqa: BLE001  # the caller raises it
            pipe.send((None, f"{type(error).__name__}: {error}\n{traceback.format_exc()}"))


@contextmanager
def running(size: int, *folders: str) -> Iterator[Ranks]:
    """Processes for as long as the block lasts, which also import from these folders."""
    ranks = Ranks(size, [*sys.path, *folders])
    try:
        yield ranks
    finally:
        ranks.close()
