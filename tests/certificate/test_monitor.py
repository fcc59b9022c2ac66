from __future__ import annotations

import json
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

import polarstep as ps
from polarstep import rng
from polarstep.certificate import Monitor, certify, measure
from polarstep_lab.models.gpt import GPT, GPTConfig
from polarstep_lab.storage import read_lines

CONFIG = GPTConfig(vocab_size=32, width=32, layers=2, heads=2, context=16)
LOW_RANK = ps.LowRank(6, 4, 1, always_sketch=True)


def train(steps, watch=None, polar=LOW_RANK):
    model = GPT(CONFIG, rng.generator("model"))
    optimizer = ps.muon_for(model, lr=0.02, polar=polar, transform=None, weight_decay=0.0)
    monitor = watch(optimizer) if watch else None
    g, losses = rng.generator("tokens"), []
    for _ in range(steps):
        tokens = torch.randint(0, 32, (4, 17), generator=g)
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    if monitor:
        monitor.close()
    return model, optimizer, monitor, torch.stack(losses)


@pytest.mark.parametrize("polar", [LOW_RANK, ps.NewtonSchulz(5, "polar-express")], ids=type)
@pytest.mark.parametrize("exact", [True, False])
def test_a_monitor_changes_nothing_bit_for_bit(polar, exact):
    before = torch.get_rng_state()
    plain, _, _, losses = train(7, polar=polar)
    watched, optimizer, monitor, watched_losses = train(
        7, lambda o: Monitor(o, every=2, exact=exact), polar
    )
    assert torch.equal(losses, watched_losses)
    for a, b in zip(plain.parameters(), watched.parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(before, torch.get_rng_state())
    assert {row["step"] for row in monitor.rows} == {0, 2, 4, 6}
    assert not optimizer._polar_hooks


def test_rows_hold_every_measure_and_are_right(tmp_path):
    seen = {}

    def watch(optimizer):
        def keep(bucket):
            if bucket.step == 4:
                for i, name in enumerate(bucket.names):
                    seen[name] = (bucket.M[i].clone(), bucket.T[i].clone())

        optimizer.register_polar_hook(keep)
        return Monitor(optimizer, every=2, jsonl=tmp_path / "rows.jsonl")

    model, _, monitor, _ = train(6, watch)
    rows = read_lines(tmp_path / "rows.jsonl")
    assert rows == json.loads(json.dumps(monitor.rows).replace("Infinity", "null"))
    by_name = {row["parameter"]: row for row in rows if row["step"] == 4}
    assert set(by_name) == {name for name, p in model.named_parameters() if p.grad is not None}
    assert len(seen) >= 8
    for name, (M, T) in seen.items():
        row = by_name[name]
        for column, value in vars(measure(M, T)).items():
            assert row[column] == pytest.approx(float(value), abs=1e-9)
        assert 0 < row["captured_energy"] <= 1 + 1e-9
        assert 0 < row["update_ratio"] < 1
        assert row["tail_low"] < row["tail_index"] <= (row["tail_high"] or math.inf)


def test_captured_energy_is_below_one_for_a_sketch_and_one_in_full_space():
    _, _, sketched, _ = train(3, lambda o: Monitor(o, every=2))
    _, _, full, _ = train(3, lambda o: Monitor(o, every=2), ps.NewtonSchulz(5, "quintic"))

    def energies(monitor):
        return [r["captured_energy"] for r in monitor.rows if r["step"] and "gamma" in r]

    assert max(energies(full)) == pytest.approx(1, abs=1e-6)
    assert min(energies(full)) == pytest.approx(1, abs=1e-6)
    assert min(energies(sketched)) < 0.999


def test_cheap_rows_bound_exact_ones():
    _, _, exact, _ = train(3, lambda o: Monitor(o, every=2))
    _, _, cheap, _ = train(3, lambda o: Monitor(o, every=2, exact=False))
    pairs = [
        (a["gamma"], b["gamma"])
        for a, b in zip(exact.rows, cheap.rows, strict=True)
        if "gamma" in a
    ]
    assert pairs
    assert all(bound >= value for value, bound in pairs)


def test_stacked_parameters_have_a_row_per_matrix():
    X = torch.nn.Parameter(torch.randn(3, 8, 6, generator=rng.generator("stack")))
    optimizer = ps.Muon([("experts", X)], polar=ps.NewtonSchulz(5, "quintic"))
    with Monitor(optimizer, every=1, tail=False) as monitor:
        X.grad = torch.randn(3, 8, 6, generator=rng.generator("gradient"))
        optimizer.step()
    assert [row["block"] for row in monitor.rows] == [0, 1, 2]
    assert len({row["gamma"] for row in monitor.rows}) == 3
    assert len({row["update_ratio"] for row in monitor.rows}) == 1


@pytest.mark.parametrize("tail", [True, False])
def test_gradients_are_kept_for_a_tail_index_alone_and_for_one_step(tail):
    X = torch.nn.Parameter(torch.eye(12))
    optimizer = ps.Muon([("weight", X)], polar=ps.NewtonSchulz(5, "quintic"))
    g, kept = rng.generator("gradients"), []
    with Monitor(optimizer, every=3, tail=tail) as monitor:
        for _ in range(7):
            X.grad = torch.randn(12, 12, generator=g)
            optimizer.step()
            kept.append(X in monitor._previous)
    assert kept == [tail and step in (2, 5) for step in range(7)]
    assert [(row["step"], "tail_index" in row) for row in monitor.rows] == [
        (0, False),
        (3, tail),
        (6, tail),
    ]


def test_tensorboard_and_select(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    calls = []

    class Spy:
        def add_scalar(self, tag, scalar_value, global_step):
            calls.append((tag, scalar_value, global_step))

    train(3, lambda o: Monitor(o, every=1, tensorboard=Spy(), select=lambda n: "mlp" in n))
    assert {tag.split("/")[0] for tag, *_ in calls} >= {"gamma", "nu", "update_ratio", "tail_index"}
    assert all("mlp" in tag for tag, *_ in calls)
    assert {step for *_, step in calls} == {0, 1, 2}
    with SummaryWriter(tmp_path) as writer:
        train(2, lambda o: Monitor(o, every=1, tensorboard=writer))
    assert list(tmp_path.glob("events*"))


def test_every_matrix_of_a_stack_has_a_curve_of_its_own():
    """Under one tag the γ of three matrices would be a single curve that jumps between them."""
    curves = {}

    class Spy:
        def add_scalar(self, tag, scalar_value, global_step):
            curves.setdefault(tag, []).append((global_step, scalar_value))

    X = torch.nn.Parameter(torch.zeros(3, 6, 4))
    optimizer = ps.Muon([("experts", X)], polar=ps.NewtonSchulz(3, "quintic"))
    with Monitor(optimizer, every=1, tensorboard=Spy(), tail=False) as monitor:
        for _ in range(2):
            X.grad = torch.randn(3, 6, 4, generator=rng.generator("stack"))
            optimizer.step()
    for block, name in enumerate(["experts", "experts[1]", "experts[2]"]):
        rows = [row for row in monitor.rows if row["block"] == block]
        assert curves[f"gamma/{name}"] == [(row["step"], row["gamma"]) for row in rows]
        assert [row["step"] for row in rows] == [0, 1]


def test_a_resumed_monitor_appends(tmp_path):
    path = tmp_path / "rows.jsonl"
    train(2, lambda o: Monitor(o, every=1, jsonl=path))
    first = len(read_lines(path))
    train(2, lambda o: Monitor(o, every=1, jsonl=path))
    assert len(read_lines(path)) == 2 * first


def test_measure_is_its_parts():
    g = rng.generator("measure")
    M = torch.randn(4, 9, 12, generator=g)
    M[2] = 0
    T = ps.LowRank(3, 2, always_sketch=True)(M)
    found, certificate = measure(M, T), certify(M, T)
    torch.testing.assert_close(found.gamma, certificate.gamma)
    torch.testing.assert_close(found.nu, certificate.nu)


def test_an_optimizer_without_polar_steps_is_refused():
    other = torch.optim.AdamW([torch.nn.Parameter(torch.eye(3))])
    with pytest.raises(TypeError, match=r"optimizer is a AdamW: expected a polarstep\.Muon"):
        Monitor(other)


def test_the_optimizer_inside_a_wrapper_is_asked_for():
    wrapped = SimpleNamespace(optimizer=ps.Muon([torch.nn.Parameter(torch.eye(3))]))
    with pytest.raises(TypeError, match=r"it wraps a polarstep\.Muon: give optimizer\.optimizer"):
        Monitor(wrapped)


def test_parameters_without_names_are_told_apart_by_their_groups():
    X, Y = (torch.nn.Parameter(torch.eye(n)) for n in (4, 5))
    optimizer = ps.Muon([{"params": [X]}, {"params": [Y]}], polar=ps.NewtonSchulz(5, "quintic"))
    with Monitor(optimizer, every=1, tail=False) as monitor:
        X.grad, Y.grad = (torch.randn(n, n, generator=rng.generator(n)) for n in (4, 5))
        optimizer.step()
    assert [(row["parameter"], row["shape"]) for row in monitor.rows] == [
        ("group 0, parameter 0", [4, 4]),
        ("group 1, parameter 0", [5, 5]),
    ]
    assert [row["parameter"] for row in monitor.rows] == [r.name for r in optimizer.routes]
    assert [row["gamma"] for row in monitor.rows] == pytest.approx(
        [float(certify(G, ps.NewtonSchulz(5, "quintic")(G)).gamma) for G in (X.grad, Y.grad)],
        abs=1e-6,
    )


def test_a_step_that_raised_leaves_no_hook_and_no_row():
    X = torch.nn.Parameter(torch.eye(4))
    optimizer = ps.Muon([("weight", X)], polar=ps.NewtonSchulz(5, "quintic"))
    with Monitor(optimizer, every=2, tail=False) as monitor:
        X.grad = torch.randn(4, 4, generator=rng.generator("gradient"))
        optimizer.param_groups[0]["lr"] = -1.0
        with pytest.raises(ValueError, match=r"lr=-1\.0"):
            optimizer.step()
        optimizer.param_groups[0]["lr"] = 0.1
        for _ in range(4):
            optimizer.step()
    assert [(row["step"], row["block"]) for row in monitor.rows] == [(0, 0), (2, 0)]
    assert not optimizer._polar_hooks


def test_cheap_rows_of_a_step_that_is_not_finite_say_so():
    X = torch.nn.Parameter(torch.eye(4))
    optimizer = ps.Muon([("weight", X)], polar=ps.NewtonSchulz(5, "quintic"))
    with Monitor(optimizer, every=1, tail=False, exact=False) as monitor:
        X.grad = torch.full((4, 4), math.nan)
        optimizer.step()
    assert [math.isnan(monitor.rows[0][column]) for column in ("gamma", "nu")] == [True, True]


def test_rows_are_appended_after_the_last_complete_line(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 0}\n{"step": 1, "par')  # as a killed run leaves it
    assert read_lines(path) == [{"step": 0}]
    X = torch.nn.Parameter(torch.eye(4))
    optimizer = ps.Muon([("weight", X)], polar=ps.NewtonSchulz(5, "quintic"))
    with Monitor(optimizer, every=1, jsonl=path, tail=False):
        X.grad = torch.eye(4)
        optimizer.step()
    assert [row.get("parameter") for row in read_lines(path)] == [None, "weight"]


def test_rows_may_be_freed_during_a_run(tmp_path):
    path = tmp_path / "rows.jsonl"
    X = torch.nn.Parameter(torch.eye(4))
    optimizer = ps.Muon([("weight", X)], polar=ps.NewtonSchulz(5, "quintic"))
    with Monitor(optimizer, every=1, jsonl=path, tail=False) as monitor:
        for _ in range(3):
            monitor.rows.clear()
            X.grad = torch.eye(4)
            optimizer.step()
    assert [row["step"] for row in monitor.rows] == [2]
    assert [row["step"] for row in read_lines(path)] == [0, 1, 2]


def test_hooks_of_all_ranks_are_forgotten_when_they_are_removed():
    optimizer = ps.Muon([torch.nn.Parameter(torch.eye(4))])
    for _ in range(5):
        optimizer.register_polar_hook(lambda bucket: None, everywhere=True).remove()
    kept = [optimizer.register_polar_hook(lambda bucket: None, everywhere=True) for _ in range(2)]
    assert optimizer._everywhere == {handle.id for handle in kept}


@pytest.mark.parametrize(("every", "error"), [(0, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_a_bad_number_of_steps_is_refused(every, error):
    optimizer = ps.Muon([torch.nn.Parameter(torch.eye(4))])
    with pytest.raises(
        error, match=f"every={every!r}: expected an integer ≥ 1; 100 samples one step"
    ):
        Monitor(optimizer, every=every)


def test_a_file_in_a_new_folder(tmp_path):
    path = tmp_path / "logs" / "today" / "gamma.jsonl"
    _, _, monitor, _ = train(1, lambda o: Monitor(o, jsonl=path))
    assert len(read_lines(path)) == len(monitor.rows) > 0


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"select": "blocks.0"}, "select='blocks.0': expected a function of a parameter's name"),
        ({"tensorboard": "runs/"}, "tensorboard='runs/': expected a writer with add_scalar"),
    ],
)
def test_an_option_that_would_fail_at_a_later_step_is_refused_at_once(option, message):
    optimizer = ps.Muon([torch.nn.Parameter(torch.eye(3))])
    with pytest.raises(TypeError, match=message):
        Monitor(optimizer, **option)


def test_a_monitor_counts_on_from_a_checkpoint_that_is_loaded_after_it_was_made():
    saved = train(4)[1].state_dict()
    _, _, monitor, _ = train(3, lambda optimizer: _loading(saved, Monitor(optimizer, every=2)))
    assert {row["step"] for row in monitor.rows} == {4, 6}
    assert all("tail_index" not in row for row in monitor.rows if row["step"] == 4)


def _loading(saved, monitor):
    monitor.optimizer.load_state_dict(saved)
    return monitor


@pytest.mark.parametrize("fails", [False, True])
def test_a_closed_monitor_holds_no_copies_of_weights_or_gradients(fails):
    """A monitor is kept for its rows; a copy of the model beside them would be kept as well."""
    X = torch.nn.Parameter(torch.eye(12))
    optimizer = ps.Muon([("weight", X)], polar=ps.NewtonSchulz(5, "quintic"))
    monitor = Monitor(optimizer, every=1)

    def closure():
        raise RuntimeError("out of data")

    for _ in range(2):
        X.grad = torch.randn(12, 12, generator=rng.generator("gradients"))
        optimizer.step()
    if fails:
        with pytest.raises(RuntimeError, match="out of data"):
            optimizer.step(closure)
    monitor.close()
    assert monitor.rows
    assert not monitor._before
    assert not monitor._previous


def test_a_monitor_closed_after_a_step_that_raised_looks_at_no_later_step():
    """Its polar hook would keep CUDA graphs from being replayed, and measure every step in vain."""
    X = torch.nn.Parameter(torch.eye(4))
    optimizer = ps.Muon([("weight", X)], polar=ps.NewtonSchulz(5, "quintic"))

    def closure():
        raise RuntimeError("out of data")

    with Monitor(optimizer, every=1) as monitor, pytest.raises(RuntimeError, match="out of data"):
        optimizer.step(closure)
    assert not optimizer._polar_hooks
    X.grad = torch.eye(4)
    optimizer.step()
    assert not monitor.rows
    assert not monitor._pending


def test_gradients_of_a_few_values_have_no_tail_index():
    """As those of an L1 loss, or of SignSGD's wire: a law that is not continuous has no tail."""
    g = rng.generator("signs")
    weight = torch.nn.Parameter(torch.randn(32, 16, generator=g))
    optimizer = ps.Muon([weight])
    with Monitor(optimizer, every=1) as monitor:
        for _ in range(3):
            weight.grad = torch.randn(32, 16, generator=g).sign()
            optimizer.step()
    assert len(monitor.rows) == 3
    assert not any("tail_index" in row for row in monitor.rows)
