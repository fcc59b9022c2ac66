"""The long run with each row at its best rate over all steps."""

from __future__ import annotations

from differences import Change, percent
from frontier import FULL
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
    validation = best_rates.gap_on_validation(study.MAP_OF_AUTO)
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
def rows_to_best() -> str:
    """Normalized rows in long runs, at their one rate, against full space at that rate and its best."""
    slug = f"{study.BASE}-rows"
    return f"{best_rates.told_gap(slug)} without them, in test perplexity {_tokens()}"


@claim
def adamw_at_both_rates() -> str:
    """AdamW against full space at its best, at the rate that the README's table has and at the other."""
    lr, chosen = best_rates.best("adamw"), study.chosen_rate("adamw")
    return (
        f"{best_rates.gap('adamw').told(unit='%')} at {lr:g} and "
        f"{best_rates.to_best('adamw').told(unit='%')} at {chosen:g}, which short runs chose, against "
        f"full space at {best_rates.best(study.BASE):g} {_tokens()}"
    )


def _level_rates() -> tuple[float, float, str]:
    """The two best rates of full space, and how far apart its runs with one seed end at them."""
    rates = best_rates.tried(study.BASE)
    first, second = sorted(rates, key=lambda lr: rates[lr])[:2]
    validation = percent({0: rates[second]}, {0: rates[first]})
    seed = best_rates.SEED
    ends = (best_rates.tests(study.BASE, lr)[seed] for lr in (second, first))
    test = percent(*({0: value} for value in ends))
    told = f"{validation.told(unit='%')} in validation and {test.told(unit='%')} in test perplexity"
    return first, second, told


@claim
def flat_at_the_best_rate() -> str:
    """How level full space is at its two best rates, and which best rates are at an end of the list."""
    first, second, apart = _level_rates()
    ends = [row.title for row in best_rates.at_an_end()]
    every = len(ends) == len(best_rates.rows())
    return (
        f"at {second:g} full space has {apart} against {first:g} {_tokens()}. The best rate is the "
        "lowest or the highest of those run to the end in "
        f"{'all of these rows' if every else '; '.join(ends) or 'no row'}"
    )


@claim
def rates_in_stages() -> str:
    """How the recipe of the long run changes its rate by itself."""
    lr, level, _ = _level_rates()
    run = best_rates.finished()[study.BASE][lr][best_rates.SEED]
    first, *later = (stage["lr"] for stage in run.identity.config["data"]["stages"])
    assert first == 1
    highest = max(row.lr for row in run.metrics) / lr
    factors = " and ".join(f"{factor:g}" for factor in later)
    return (
        f"multiplies the rate by {factors} in its second and third stage, before the rate falls, so "
        f"that {lr:g} and {level:g} are {highest * lr:.3g} and {highest * level:.3g} at their highest"
    )


@claim
def rates_by_length() -> str:
    """The best rates of full space in runs of one recipe, of a tenth of its steps and of all."""
    short = study.rates()[study.BASE]
    steps = sum(SHORT[f"data.stages.{stage}.steps"] for stage in range(3))
    first, second, apart = _level_rates()
    return (
        f"{study.chosen_rate(study.BASE):g} in runs of {steps} steps, of {len(short)} rates (one seed). "
        f"In runs of 1110 steps, of {study.million_tokens():.1f}M tokens, {first:g} and {second:g} are "
        f"level ({second:g} has {apart} against {first:g})"
    )


@claim
def rates_of_shorter_runs() -> str:
    """The two rates of full space in the runs of the frontier."""
    (base, low), high = quality.BASE, quality.chosen(FULL)
    assert high is not None
    assert low != high
    apart = quality.quality((base, high), (base, low))
    level = "not told apart" if apart.ends[0] <= 0 <= apart.ends[1] else "told apart"
    return (
        f"{low:g} and {high:g} are {level}: {high:g}, which one seed chose, has "
        f"{apart.told(unit='%')} against {low:g} in test perplexity after "
        f"{quality.million_tokens():.1f}M tokens"
    )
