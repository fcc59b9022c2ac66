"""``torch.optim.Muon`` beside our full space: what a step costs, and where training ends."""

from __future__ import annotations

from pages.claims.cost import ratio
from pages.claims.words import claim
from pages.records.costs import AUTO, FULL_SPACE, HELD, on_hosts, steps
from pages.records.maps import peers
from pages.records.quality import BASE, at_chosen_rates, chosen, million_tokens, quality

TORCHS = "torch.optim.Muon"


def _beside(load: str) -> str:
    """Its price on a workload, from the lowest of all hosts to the highest, and ours."""
    found = [row["ratio"] for row in on_hosts(TORCHS, load)]
    ours, auto = (f"{steps()[name, load]['ratio']:.1f}" for name in (FULL_SPACE, AUTO))
    theirs = f"{min(found):.0f} to {max(found):.0f} times AdamW's"
    return f'{theirs} where ours takes {ours}, and {auto} with `"auto"`'


@claim
def price_of_torchs_muon() -> str:
    """What a step of torch's Muon costs on both sets of matrices, beside ours."""
    hosts = len(on_hosts(TORCHS, "nanoGPT"))
    (graph,) = (each.timed for each in peers() if each.title == "Muon of dion")
    assert graph is not None
    assert "CUDA graph" in graph
    dions = " and ".join(ratio(graph, load) for load in HELD)
    return (
        f"{_beside('nanoGPT')}, on nanoGPT's matrices, and {_beside('8B layer')}, on an 8B layer (H200, "
        f"torch's on {hosts} hosts). dion's Muon in its CUDA graph takes {dions} times"
    )


@claim
def quality_of_torchs_muon() -> str:
    """Where it ends against our full space, at both rates of full space."""
    (its,) = (each.trained for each in peers() if each.title == TORCHS)
    assert its is not None
    own = at_chosen_rates(its[0])
    assert own is not None
    return (
        f"{own.change.told(unit='%')} in test perplexity after {million_tokens():.1f}M tokens against "
        f"our full space, with both at {chosen(BASE[0])}, the rate that one seed chose for each, and "
        f"{quality(its).told(unit='%')} against ours at {BASE[1]}, which is better on the seeds shown "
        "and was not run for torch's on all of them"
    )
