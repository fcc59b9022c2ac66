"""The rooms of the package, the tests of each, and how many of its mutants are drawn."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from pathlib import Path

from tests.mutants.operators import Mutant, mutants_of

__all__ = ["PACKAGE", "ROOMS", "Room", "drawn", "possible"]

PACKAGE = Path("src/polarstep")
# These run on a GPU alone: replayed CUDA graphs, and cuBLAS.
ON_A_GPU = {"engines/replay.py", "ops/cuda.py"}
# These run on a GPU, or in Triton's interpreter; tests/kernels has their tests.
IN_THE_INTERPRETER = (
    "engines/fused.py",
    "engines/replay_plan.py",
    "ops/float8.py",
    "ops/triton.py",
)


@dataclass(frozen=True)
class Room:
    """A folder or file of the package."""

    tests: str
    sample: int
    sources: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)

    def files(self) -> list[Path]:
        """The files that are changed."""
        found = []
        for source in self.sources:
            path = PACKAGE / source
            found += [path] if path.is_file() else sorted(path.rglob("*.py"))
        given = [PACKAGE / source for source in self.sources]
        elsewhere = {PACKAGE / name for name in (*ON_A_GPU, *IN_THE_INTERPRETER)} - {*given}
        names = ("__init__.py", "__main__.py")
        return [each for each in found if each not in elsewhere and each.name not in names]

    def test_files(self) -> list[Path]:
        """The files with its tests."""
        path = Path(self.tests)
        return [path] if path.is_file() else sorted(path.glob("test_*.py"))


def _folder(name: str, sample: int) -> Room:
    return Room(f"tests/{name}", sample, (name,))


def _file(name: str, sample: int) -> Room:
    return Room(f"tests/test_{name}.py", sample, (f"{name}.py",))


ROOMS = {
    "ops": _folder("ops", 30),
    "theory": _folder("theory", 40),
    "maps": _folder("maps", 66),
    "numerics.py": Room("tests/ops", 15, ("numerics.py",)),
    "certificate": _folder("certificate", 40),
    "optim": Room(
        "tests/optim", 25, ("optim", "muon.py", "bucket.py", "state.py", "exchange.py", "engines")
    ),
    "matrix.py": _file("matrix", 15),
    "checked_values.py": _file("checked_values", 15),
    "context.py": _file("context", 25),
    "rng.py": _file("rng", 15),
    "storage.py": _file("storage", 15),
    "flops.py": _file("flops", 15),
    "convert": Room("tests/test_convert.py", 45, ("convert",)),
    "cuda_graphs.py": _file("cuda_graphs", 20),
    # The next two take minutes for a mutant: processes are started, kernels are interpreted.
    "distributed": _folder("distributed", 20),
    "kernels": Room(
        "tests/kernels", 100, ("kernels", *IN_THE_INTERPRETER), {"TRITON_INTERPRET": "1"}
    ),
}


def possible(room: Room) -> list[tuple[Path, Mutant]]:
    """All mutants of a room."""
    return [(file, mutant) for file in room.files() for mutant in mutants_of(file.read_text())]


def drawn(room: Room, seed: int, count: int) -> list[tuple[Path, Mutant]]:
    """The sample of this seed: mutants are drawn from the whole room, each as likely as the others.

    A mutant's place in the sequence depends on its name and the seed alone. A larger sample begins with
    the smaller one, and a change elsewhere in the room leaves it in its place.
    """

    def place(each: tuple[Path, Mutant]) -> bytes:
        file, its = each
        name = repr((seed, str(file), its.where, its.was, its.now, its.nth))
        return hashlib.blake2b(name.encode(), digest_size=8).digest()

    return sorted(possible(room), key=place)[:count]
