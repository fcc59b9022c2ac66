"""The long run with each row at its best rate over all steps."""

from __future__ import annotations

from differences import Change, percent
from frontier import FULL, STEPS
from long_run import SHORT
from pages.claims.long_run import long_gap, step_times
from pages.claims.words import claim
from pages.records import best_rates, quality
from pages.records import long_run as study


def _tokens() -> str:
    return f"after {study.million_tokens():.1f}M tokens"


def _from_its_row(slug: str) -> tuple[float, Change]:
    """The best rate of a row over all steps, and its runs there against those of the table."""
    lr = best_rates.best(slug)
    return lr, percent(best_rates.tests(slug, lr), study.tests(slug))


@claim
def rates_over_all_steps() -> str:
    """What better rates over all steps are worth."""
    told = []
    for slug, words in (
        (study.BASE, "full space"),
        (study.MAP_OF_AUTO, "the map of `auto`"),
        ("adamw", "AdamW"),
    ):
        lr, apart = _from_its_row(slug)
        told.append(
            f"{words} {apart.told(unit='%')} at {lr:g} in place of {study.chosen_rate(slug):g}"
        )
    return f"{', '.join(told)}, in test perplexity {_tokens()}"


@claim
def closest_map() -> str:
    """How near the map of ``auto`` comes to full space in long runs."""
    validation = percent(
        *(
            best_rates.validations(slug, best_rates.best(slug))
            for slug in (study.MAP_OF_AUTO, study.BASE)
        )
    )
    return (
        f"{best_rates.gap(study.MAP_OF_AUTO).told(unit='%')} in test perplexity against full space "
        f"{_tokens()}, each at the best of its rates ({validation.told(unit='%')} in validation)"
    )


@claim
def auto_long_run() -> str:
    """The map of ``auto`` in the long run, at both rates, and its time."""
    slug, chosen = study.MAP_OF_AUTO, study.chosen_rate(study.BASE)
    return (
        f"{closest_map()}. At {chosen:g}, which short runs chose for both, it has {long_gap(slug)}, and "
        f"takes {step_times(slug, study.BASE)}. Its rank was chosen among three by the runs at that "
        "rate, which have the same seeds"
    )


@claim
def adamw_at_its_best() -> str:
    """AdamW against full space, each at its best rate over all steps."""
    return (
        f"{best_rates.gap('adamw').told(unit='%')} against full space in test perplexity {_tokens()}, "
        "each at the best of its rates over all steps"
    )


@claim
def adamw_warm_up() -> str:
    """AdamW with a warm-up against AdamW without, at one rate, and at the rate of its short runs."""
    without, slug = study.tests("adamw"), "adamw-warmup"
    short = study.rates()[slug]
    lr, chosen = study.chosen_rate("adamw"), study.chosen_rate(slug)
    alike = percent(best_rates.tests(slug, lr), without)
    row = percent(study.tests(slug), without)
    return (
        f"with one over the first 100 of 1110 steps it ends {alike.told(unit='%')} from the runs "
        f"without in test perplexity {_tokens()}, both at {lr:g}. At "
        f"{chosen:g}, which short runs chose for it, it ends {row.told(unit='%')} from "
        f"them. In the short runs it has {short[lr]:.0f} in validation at {lr:g} and "
        f"{short[chosen]:.0f} at {chosen:g} (one seed)"
    )


@claim
def full_space_at_the_rate_of_others() -> str:
    """How far full space is from its best where all other rows of Muon are."""
    lr, chosen = best_rates.best(study.BASE), study.chosen_rate(study.BASE)
    lost = percent(study.tests(study.BASE), best_rates.tests(study.BASE, lr))
    return (
        f"at {chosen:g} full space has {lost.told(unit='%')} against {lr:g} in test perplexity "
        f"{_tokens()}"
    )


@claim
def flat_at_the_best_rate() -> str:
    """How level full space is at its two best rates, and which best rates are at an end of the list."""
    rates = best_rates.tried(study.BASE)
    first, second = sorted(rates, key=lambda lr: rates[lr])[:2]
    away = percent({0: rates[second]}, {0: rates[first]})
    ends = [row.title for row in best_rates.at_an_end()]
    every = len(ends) == len(best_rates.rows())
    return (
        f"full space has {away.told(unit='%')} in validation perplexity at {second:g} against "
        f"{first:g} {_tokens()}. The best rate is the lowest or the highest of those run to the end in "
        f"{'all of these rows' if every else '; '.join(ends) or 'no row'}"
    )


@claim
def rates_by_length() -> str:
    """The best rates of full space in runs of three lengths."""
    short, whole = study.rates()[study.BASE], best_rates.tried(study.BASE)
    steps = sum(SHORT[f"data.stages.{stage}.steps"] for stage in range(3))
    first, second = sorted(whole, key=lambda lr: whole[lr])[:2]
    apart = percent({0: whole[second]}, {0: whole[first]})
    return (
        f"{study.chosen_rate(study.BASE):g} in runs of {steps} steps (of {len(short)} rates, one seed), "
        f"{quality.BASE[1]:g} in runs of {STEPS} steps on {quality.million_tokens():.1f}M tokens (of "
        f"{len(quality.RATES)}), where one seed chooses {quality.chosen(FULL):g}, and {first:g} in runs "
        f"of 1110 steps on {study.million_tokens():.1f}M tokens (of {len(whole)}, one seed), where "
        f"{second:g} has {apart.told(unit='%')} against it in validation perplexity"
    )
