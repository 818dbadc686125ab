"""The group of rescalings: scales and their laws (`scaling`), balancing (`balance`), telling copies (`equivalence`)."""
