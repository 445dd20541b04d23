"""Experiments as values."""

import math
import re

import pytest

from tests.plan.graphs import mlp, vgg
from workbench.plan import (
    CIFAR10,
    SGD,
    AdamW,
    Codec,
    Digits,
    Experiment,
    ExperimentError,
    ImageFolder,
    LocalSGD,
    Loss,
    ParameterServer,
    Pipelined,
    Plan,
    Synchronous,
    Synthetic,
)

PLAN = Plan.hybrid(vgg(), 4, 2)
FIELDS = dict(plan=PLAN, data="digits", optimizer=SGD(lr=0.1, momentum=0.9), steps=10)


def test_every_choice_has_a_name():
    assert Experiment(**FIELDS).data == Digits()
    named = Experiment(**FIELDS).replace(data="cifar10", optimizer="adamw", sync="pipelined")
    assert (named.data, named.optimizer, named.sync) == (CIFAR10(), AdamW(), Pipelined())
    assert named.replace(sync="local_sgd", optimizer="sgd").sync == LocalSGD()


def test_the_learning_rate_needs_no_name():
    assert SGD(0.1, momentum=0.9) == SGD(lr=0.1, momentum=0.9)
    assert AdamW(1e-4).lr == 1e-4
    with pytest.raises(TypeError, match=r"SGD takes lr alone without its name, got \(0.1, 0.9\)"):
        SGD(0.1, 0.9)
    with pytest.raises(TypeError, match="multiple values"):
        SGD(0.1, lr=0.2)


@pytest.mark.parametrize("data", [Digits(), Synthetic(samples=8), ImageFolder(root="x")])
@pytest.mark.parametrize("optimizer", [SGD(lr=0.1), AdamW(lr=1e-4, betas=(0.8, 0.9))])
def test_text_and_back(data, optimizer, tmp_path):
    experiment = Experiment(
        plan=PLAN,
        data=data,
        optimizer=optimizer,
        steps=3,
        batch_size=8,
        accumulate=2,
        checkpoint_every=2,
        precision="bf16",
        sync=Synchronous(bucket_bytes=100),
    )
    experiment.save(tmp_path / "e.toml")
    assert Experiment.load(tmp_path / "e.toml") == experiment


@pytest.mark.parametrize(
    ("given", "same"),
    [
        (dict(optimizer="SGD"), dict(optimizer="sgd")),
        (dict(optimizer="AdamW"), dict(optimizer="adamw")),
        (dict(optimizer={"kind": "AdamW", "lr": 0.1}), dict(optimizer=AdamW(0.1))),
        (dict(sync="Pipelined"), dict(sync="pipelined")),
        (dict(sync="LocalSGD"), dict(sync="local_sgd")),
        (dict(sync=Synchronous(codec="INT8")), dict(sync=Synchronous(codec="int8"))),
        (dict(sync=Synchronous(codec="topk")), dict(sync=Synchronous(codec="top_k"))),
        (dict(sync=Pipelined(codec=Codec(name="INT8"))), dict(sync=Pipelined(codec="int8"))),
        (dict(sync=Synchronous(algorithm="Ring")), dict(sync=Synchronous(algorithm="ring"))),
        (dict(data="CIFAR-10"), dict(data="cifar10")),
        (dict(schedule="WarmupCosine"), dict(schedule="warmup_cosine")),
    ],
)
def test_names_are_taken_in_any_case(given, same):
    taken = Experiment(**FIELDS | given)
    assert taken == Experiment(**FIELDS | same)
    assert Experiment.from_toml(taken.to_toml()) == taken


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(data="digit"), "data: no data 'digit'"),
        (dict(steps=0), "steps: .*greater than or equal to 1 .got 0"),
        (dict(steps="many"), "steps: .*valid integer.*got 'many'"),
        (dict(batch_size=-2), "batch_size: .*got -2"),
        (dict(batch_size=2, accumulate=3), "batch_size 2 cannot be computed in 3 micro-batches"),
        (dict(optimizer=0.1), "optimizer: .*got 0.1"),
        (dict(precision="fp8"), "precision: .*'fp32', 'bf16', 'fp16' or 'fp64'.*got 'fp8'"),
        (dict(passes=3), "passes: there is no such field; there are plan, data, loss"),
        (dict(step=3), "step: there is no such field; did you mean steps"),
        (dict(plan="vgg"), "plan must be a Plan, got str"),
        (dict(sync="local"), "sync: no sync 'local'; there are 'synchronous', 'local_sgd'"),
        (dict(optimizer="lion"), "optimizer: no optimizer 'lion'; there are 'sgd', 'adam'"),
        (dict(optimizer="Adams"), "no optimizer 'Adams'; there are .*; did you mean 'adam'"),
        (dict(sync="pipeline"), "no sync 'pipeline'; there are .*; did you mean 'pipelined'"),
        (dict(sync={"kind": "local"}), "sync: .*'local'.*'synchronous', 'local_sgd'"),
        (dict(sync={"kind": "local_sgd", "every": 0}), "every: .*got 0"),
    ],
)
def test_wrong_fields_get_one_clear_error(wrong, says):
    with pytest.raises(ExperimentError, match=says):
        Experiment(**{**FIELDS, **wrong})


@pytest.mark.parametrize(
    "wrong", [dict(lr=0), dict(lr=0.1, momentum=1.0), dict(lr=0.1, nesterov=True), dict(rate=1)]
)
def test_wrong_optimizers(wrong):
    with pytest.raises(ExperimentError, match=r"^SGD: "):
        SGD(**wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(every=0), "every: .*greater than or equal to 1 .got 0"),
        (dict(every=1.5), "every: .*got 1.5"),
        (dict(momentum="drop"), "momentum: .*'keep', 'average' or 'reset'.*got 'drop'"),
        (dict(period=3), "period: there is no such field"),
    ],
)
def test_wrong_local_sgd(wrong, says):
    with pytest.raises(ExperimentError, match=f"^LocalSGD: {says}"):
        LocalSGD(**wrong)


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (dict(width=0), "width: .*greater than or equal to 1 .got 0"),
        (dict(width=2.5), "width: .*got 2.5"),
        (dict(warmup=-1), "warmup: .*got -1"),
        (dict(compensation="predict"), "compensation: .*'delay'.*got 'predict'"),
        (dict(width=1, compensation="delay"), "valid with width >= 2"),
        (dict(codec="int8", algorithm="backend"), "'backend' cannot take codec 'int8'"),
        (dict(per_round=True), "per_round .* valid with Synchronous"),
    ],
)
def test_wrong_pipelines(wrong, says):
    with pytest.raises(ExperimentError, match=f"^Pipelined: .*{says}"):
        Pipelined(**wrong)


def test_where_strategies_do_not_compose():
    with pytest.raises(ExperimentError, match="rank of the world, 0 to 3, got 4"):
        Experiment(**FIELDS, sync=ParameterServer(server=4))
    with pytest.raises(ExperimentError, match=r"server alone has it.*Synchronous and Pipelined"):
        Experiment(**FIELDS, sync=ParameterServer(), shard_optimizer=True)
    with pytest.raises(ExperimentError, match=r"server: .*got -1"):
        ParameterServer(server=-1)


def test_what_strategies_say_of_themselves():
    assert Pipelined(width=1).inexact == ParameterServer().inexact == ""
    assert Pipelined().inexact == "gradients are 1 step late"
    late = Pipelined(width=4, warmup=20, compensation="delay", codec="fp16")
    assert late.inexact == (
        "gradients are 3 steps late after 20 steps, with delay compensation; "
        "gradients travel as fp16"
    )
    assert "(gradients are 1 step late)" in repr(Experiment(**FIELDS, sync=Pipelined()))


def test_wrong_algorithm():
    with pytest.raises(ExperimentError, match=r"^Synchronous: algorithm: .*'ring'.*got 'tree'"):
        Synchronous(algorithm="tree")


@pytest.mark.parametrize(
    "sync",
    [
        Synchronous(),
        Synchronous(algorithm="ring"),
        LocalSGD(every=7, momentum="average"),
        Pipelined(),
        Pipelined(width=3, warmup=9, compensation="delay", codec="int8"),
        ParameterServer(server=2),
    ],
)
def test_strategies_survive_their_text(sync):
    experiment = Experiment(**FIELDS, sync=sync)
    assert Experiment.from_toml(experiment.to_toml()) == experiment
    assert ("every 7 steps" in repr(experiment)) == isinstance(sync, LocalSGD)


def test_wrong_text():
    text = Experiment(**FIELDS).to_toml()
    with pytest.raises(ExperimentError, match="steps"):
        Experiment.from_toml(text.replace("steps = 10", 'steps = "ten"'))
    with pytest.raises(ExperimentError, match=r"no \[experiment\] table"):
        Experiment.from_toml(text.replace("[experiment]", "[other]"))


def test_replace_validates():
    assert Experiment(**FIELDS).replace(steps=5).steps == 5
    with pytest.raises(ExperimentError, match="steps"):
        Experiment(**FIELDS).replace(steps=-5)


@pytest.mark.parametrize(
    ("shares", "ranks"),
    [((0, 1, 0, 1), "[0, 2]"), ((1, 0, 1, 0), "[1, 3]"), ((0, 0, 0, 0), "[0, 2]")],
)
def test_somebody_updates_every_part_of_a_cut_weight(shares, ranks):
    plan = Plan.data_parallel(mlp(4, 6, 2), 4)
    fields = {**FIELDS, "plan": plan.with_layer("fc0", scheme="shard_out", group_size=2)}
    with pytest.raises(ExperimentError, match=re.escape(ranks)):
        Experiment(**fields, shard_optimizer=shares)


def test_what_one_rank_alone_holds_needs_no_share():
    plan = Plan.data_parallel(mlp(4, 6, 2), 2)
    fields = {**FIELDS, "plan": plan.with_layer("fc0", scheme="shard_out", group_size=2)}
    assert Experiment(**fields, shard_optimizer=(0, 1)).optimizer_shares == (0, 1)
    with pytest.raises(ExperimentError, match="2 numbers >= 0, one for each rank"):
        Experiment(**fields, shard_optimizer=(0, 1, 1))


@pytest.mark.parametrize(("shares", "ranks"), [((0, 1, 0, 1), [0, 2]), ((1, 0, 1, 0), [1, 3])])
def test_the_first_and_the_last_piece_are_looked_at(shares, ranks):
    with pytest.raises(ExperimentError, match=rf"ranks \[{ranks[0]}, {ranks[1]}\] alone hold"):
        Experiment(**FIELDS, shard_optimizer=shares)


@pytest.mark.parametrize(
    ("fields", "said"), [(dict(epochs=0), "epochs"), (dict(epochs=1, batch_size=0), "batch_size")]
)
def test_steps_of_no_epochs_are_refused_by_name(fields, said):
    with pytest.raises(ExperimentError, match=f"{said}: .*got 0"):
        Experiment(**{**FIELDS, "steps": None, **fields})


WEIGHTED = Loss(math.exp, weights=math.exp)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (dict(sync=LocalSGD()), "step before under LocalSGD"),
        (
            dict(plan=PLAN.with_rounds("B"), sync=Synchronous(per_round=True)),
            "step before under per_round=True",
        ),
    ],
)
def test_weights_of_rows_add_up_over_a_batch(fields, said):
    with pytest.raises(ExperimentError, match=said):
        Experiment(**FIELDS | fields, loss=WEIGHTED)
    assert Experiment(**FIELDS | fields, loss=Loss(math.exp)).loss.weights is None


@pytest.mark.parametrize("sync", [Synchronous(), ParameterServer(), Pipelined()])
def test_weights_of_rows_are_valid_where_weights_step_together(sync):
    assert Experiment(**FIELDS, loss=WEIGHTED, sync=sync).loss == WEIGHTED


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({}, "lr=0.1, fp32"),
        (dict(shard_optimizer=True), "lr=0.1, sharded over replicas, fp32"),
        (
            dict(shard_optimizer=True, sync=Synchronous(algorithm="direct")),
            "lr=0.1, sharded over replicas and fused, fp32",
        ),
        (
            dict(shard_optimizer=True, sync=Pipelined()),
            "lr=0.1, sharded over replicas (gradients are 1 step late), fp32",
        ),
        (dict(sync=LocalSGD(every=3)), "lr=0.1 (local SGD averages parameters every 3 steps), fp"),
    ],
)
def test_its_strategy_is_told(fields, said):
    assert said in repr(Experiment(**FIELDS, **fields))


def test_repr():
    assert (
        repr(Experiment(**FIELDS))
        == str(Experiment(**FIELDS))
        == ("<Experiment Toy on 4 ranks: digits, 10 steps of 128, sgd lr=0.1, fp32, seed 0>")
    )


def test_names_are_those_of_the_value():
    names = {name for name in dir(SGD(0.1)) if not name.startswith("_")}
    assert names >= {"kind", "lr", "momentum", "nesterov", "replace", "weight_decay"}
    assert not names & {"model_dump", "copy", "json", "model_fields"}


@pytest.mark.parametrize("base", [Codec, SGD, Synchronous, Synthetic, Experiment])
def test_a_class_of_ones_own_would_not_reach_the_ranks(base):
    with pytest.raises(TypeError, match=f"Mine extends {base.__name__}, which is a value"):
        type("Mine", (base,), {"__module__": "__main__"})
