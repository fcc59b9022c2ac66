"""The maps and optimizers of the tables and figures: what each is called in the records."""

from __future__ import annotations

from dataclasses import dataclass, replace

from frontier import GONE, WIDTH, maps, parts_of
from pages.records.costs import (
    AUTO,
    COLUMNS_ON_ARM,
    EIGHTH,
    FULL_SPACE,
    HELD,
    SCALED_SIXTH,
    SIXTH,
    TWELFTH,
    columns_of_auto,
    steps,
)
from pages.records.quality import BASE, best_run, chosen
from polarstep import Deflated, LowRank
from polarstep_lab.optimizers.peers import PEERS
from step_workloads import ON_A_CPU, WORKLOADS

NEAR = 0.02
"""How far the part of the width that a sketch was timed with may be from that of its runs."""


@dataclass(frozen=True)
class Weighed:
    """A map whose cost and quality stand side by side.

    ``timed`` is its name in the times and ``trained`` its name and rate in the runs; ``None`` where the
    record does not have it. ``columns`` are ℓ on the workloads of :data:`HELD`, as far as it was timed
    there; ``None`` in full space. ``long`` is its row in the long run.
    """

    title: str
    timed: str | None
    trained: tuple[str, float] | None
    columns: tuple[int, ...] | None = None
    long: str | None = None

    @property
    def name(self) -> str:
        """The title, with ℓ and its part of the width of the two workloads."""
        if self.columns is None:
            return self.title
        return f"{self.title}, ℓ = {' and '.join(with_shares(self.columns))}"

    @property
    def trained_columns(self) -> int | None:
        """ℓ in the runs, whose matrices have :data:`frontier.WIDTH` rows; ``None`` without a sketch."""
        if self.columns is None or self.trained is None:
            return None
        name = parts_of(self.trained[0])[0]
        if name in GONE:
            return GONE[name][1]
        polar = maps()[name][1]
        head = polar.head if isinstance(polar, Deflated) else polar
        assert isinstance(head, LowRank), self.title
        return head.width

    def columns_on(self, load: str) -> int | None:
        """ℓ as timed on a workload of :data:`HELD`; ``None`` without a sketch or where not timed."""
        return dict(zip(HELD, self.columns or (), strict=False)).get(load)

    def columns_on_arm(self, load: str) -> int | None:
        """The same for the record of an ARM CPU."""
        if self.columns is None or self.timed is None:
            return None
        name = self.timed.removesuffix(", rows normalized")
        return COLUMNS_ON_ARM.get(name, ON_A_CPU[load].width)

    def trained_as(self, timed: int | None, width: int) -> bool:
        """Whether the sketch was trained with the part of the width that it has in a time.

        A map without a sketch was.
        """
        trained = self.trained_columns
        if timed is None or trained is None:
            return self.columns is None
        return abs(timed / width - trained / WIDTH) < NEAR


def with_shares(columns: tuple[int, ...]) -> list[str]:
    """ℓ on the workloads of :data:`HELD`, as far as it was timed there, with its part of the width."""
    return [with_share(ell, d) for ell, d in zip(columns, HELD.values(), strict=False)]


def with_share(ell: int, width: int) -> str:
    """ℓ with its part of the width, as ``128 (17%)``."""
    return f"{ell}\N{NO-BREAK SPACE}({ell / width:.0%})"


def timed_with_less(load: str) -> list[Weighed]:
    """The maps whose sketch on a workload is not the part of the width that it was trained with."""
    return [
        each
        for each in weighed()
        if each.trained and (each.timed, load) in steps()
        if not each.trained_as(each.columns_on(load), HELD[load])
    ]


def at_chosen(name: str) -> tuple[str, float]:
    """A map at the rate that one seed chose for it, or at that of :data:`BASE` where none was."""
    rate = chosen(name)
    return name, BASE[1] if rate is None else rate


def weighed() -> tuple[Weighed, ...]:
    """The maps of the tables and figures, best first."""
    wide = tuple(WORKLOADS[load].width for load in HELD)
    sixth, eighth, twelfth = (
        f"`Deflated`, warm, {part}" for part in ("a sixth", "an eighth", "a twelfth")
    )
    return (
        Weighed("AdamW, fused", "AdamW, fused", best_run("adamw"), long="adamw"),
        Weighed("full space", FULL_SPACE, BASE, long="muon-polar-express"),
        Weighed(
            "full space, `NormalizedRows`",
            with_rows(FULL_SPACE),
            at_chosen("full+rows"),
            long="muon-polar-express-rows",
        ),
        Weighed("full space, `fan-ratio`", FULL_SPACE, at_chosen("full+fans")),
        Weighed(sixth, SIXTH, at_chosen("lift-120-warm"), (128, 688), "deflated-120"),
        Weighed(
            f"{sixth}, `NormalizedRows`",
            with_rows(SIXTH),
            at_chosen("lift-120-warm+rows"),
            (128, 688),
            "deflated-120-rows",
        ),
        Weighed(
            f"{sixth}, `NormalizedRows`, `fan-ratio`",
            with_rows(SIXTH),
            at_chosen("lift-120-warm+rows+fans"),
            (128, 688),
        ),
        Weighed(eighth, EIGHTH, at_chosen("lift-88-warm"), (96, 512), "deflated-88"),
        Weighed(
            f"{eighth}, `NormalizedRows`",
            with_rows(EIGHTH),
            at_chosen("lift-88-warm+rows"),
            (96, 512),
        ),
        Weighed(twelfth, TWELFTH, at_chosen("lift-56-warm"), (64, 352), "deflated"),
        Weighed(
            f"{twelfth}, `NormalizedRows`",
            with_rows(TWELFTH),
            at_chosen("lift-56-warm+rows"),
            (64, 352),
            "deflated-rows",
        ),
        Weighed(
            "`Deflated`, h = 1, rest scaled",
            "Deflated, Gaussian h=1, rest scaled",
            at_chosen("scaled-200"),
            wide,
        ),
        Weighed(
            "`Deflated`, h = 1, rest scaled, `NormalizedRows`",
            with_rows("Deflated, Gaussian h=1, rest scaled"),
            at_chosen("scaled-200+rows"),
            wide,
        ),
        Weighed(
            f"{sixth}, rest scaled", timed_as(SCALED_SIXTH), at_chosen("scaled-120-warm"), (128,)
        ),
        Weighed(
            f"{sixth}, rest scaled, `NormalizedRows`",
            with_rows(SCALED_SIXTH),
            at_chosen("scaled-120-warm+rows"),
            (128,),
        ),
        Weighed("`LowRank`, h = 0", "LowRank, Gaussian h=0", at_chosen("low-rank"), wide),
        Weighed(
            "`LowRank`, h = 0, `NormalizedRows`",
            with_rows("LowRank, Gaussian h=0"),
            at_chosen("low-rank+rows"),
            wide,
        ),
        Weighed("… basis kept 4 steps", "LowRank, Gaussian h=0, kept 4 steps", None, wide),
        Weighed("`LowRank`, warm", "LowRank, warm", None, wide),
        Weighed(
            "`LowRank`, the paper's",
            "LowRank, the paper's (h=1, q=7)",
            at_chosen("paper"),
            wide,
            "rand-muon",
        ),
        Weighed(
            "`LowRank`, the paper's, `NormalizedRows`",
            with_rows("LowRank, the paper's (h=1, q=7)"),
            at_chosen("paper+rows"),
            wide,
        ),
    )


HEADLINE = (
    ("AdamW, fused", "AdamW, fused"),
    ("nothing: full space", "full space"),
    ("`transform=ps.NormalizedRows()`", "full space, `NormalizedRows`"),
    ('`polar="auto"`', "`Deflated`, warm, a sixth"),
    (
        '`polar="auto"`, `transform=ps.NormalizedRows()`',
        "`Deflated`, warm, a sixth, `NormalizedRows`",
    ),
    (
        '… and `shape_scale="fan-ratio"`',
        "`Deflated`, warm, a sixth, `NormalizedRows`, `fan-ratio`",
    ),
    ("`polar=ps.LowRank(…, power=0)`", "`LowRank`, h = 0"),
    ("`polar=ps.LowRank(…)`, as published", "`LowRank`, the paper's"),
)
"""The README's rows: what a user gives, and the title of the map in :func:`weighed`."""


def headline_maps() -> list[tuple[str, Weighed]]:
    """The README's rows: what a user gives, and the map.

    Rows of ``auto`` have its own times and columns. At width 768, which was trained, it takes a sixth.
    """
    maps = {each.title: each for each in weighed()}
    return [(given, _as_auto(maps[title])) for given, title in HEADLINE]


def _as_auto(each: Weighed) -> Weighed:
    """A map with ℓ = a sixth with the times and columns of ``auto``; others as they are."""
    if each.timed is None or not each.timed.startswith(SIXTH):
        return each
    return replace(each, timed=AUTO + each.timed.removeprefix(SIXTH), columns=columns_of_auto())


def timed_as(name: str) -> str | None:
    """The name of a map in the times; ``None`` where it was not timed."""
    return name if any(name == each for each, _ in steps()) else None


def with_rows(timed: str) -> str | None:
    """The name of a map with normalized rows in the times; ``None`` where it was not timed."""
    return timed_as(f"{timed}, rows normalized")


def peers() -> tuple[Weighed, ...]:
    """The optimizers of other libraries that were timed or trained, each at :func:`best_run`.

    Of a peer that was timed in several forms, with a CUDA graph of its own or without, the fastest on
    nanoGPT's matrices counts.
    """
    found = []
    for peer in PEERS.values():
        forms = {
            name: row["ms"]
            for (name, load), row in steps().items()
            if load == "nanoGPT" and (name == peer.title or name.startswith(f"{peer.title}, CUDA"))
        }
        timed = min(forms, key=lambda name: forms[name]) if forms else None
        trained = best_run(f"peer:{peer.name}")
        if timed or trained:
            found.append(Weighed(peer.title, timed, trained, long=peer.name))
    return tuple(found)


def short_name(title: str) -> str:
    """The name of a map or an optimizer in a figure, from its title in the tables."""
    name = title.split(", trained")[0].replace("`", "")
    return SHORT.get(name, name)


SHORT = {
    "full space, NormalizedRows": "full space + rows",
    "full space, fan-ratio": "full space + fan-ratio",
    "Deflated, warm, a sixth": "Deflated 1/6",
    "Deflated, warm, a sixth, NormalizedRows": "Deflated 1/6 + rows",
    "Deflated, warm, a sixth, NormalizedRows, fan-ratio": "1/6 + rows + fan-ratio",
    "Deflated, warm, an eighth": "Deflated 1/8",
    "Deflated, warm, an eighth, NormalizedRows": "Deflated 1/8 + rows",
    "Deflated, warm, a twelfth": "Deflated 1/12",
    "Deflated, warm, a twelfth, NormalizedRows": "Deflated 1/12 + rows",
    "Deflated, warm, a sixth, rest scaled": "1/6, scaled",
    "Deflated, warm, a sixth, rest scaled, NormalizedRows": "1/6, scaled + rows",
    "Deflated, h = 1, rest scaled": "h = 1, scaled",
    "Deflated, h = 1, rest scaled, NormalizedRows": "h = 1, scaled + rows",
    "LowRank, h = 0, NormalizedRows": "h = 0 + rows",
    "LowRank, the paper's, NormalizedRows": "the paper's + rows",
    "torch.optim.Muon": "torch",
    "Muon of K. Jordan": "Jordan",
    "Muon of dion": "dion",
    "NorMuon of dion": "NorMuon",
    "Dion2 (a quarter of the rows)": "Dion2",
    "Dion3 (a quarter of the rows)": "Dion3",
    "SOAP of pytorch_optimizer": "SOAP",
    "AdamW, head at the rate of the matrices": "AdamW, one rate",
}
"""Names in the figures that are shorter than in the tables."""
