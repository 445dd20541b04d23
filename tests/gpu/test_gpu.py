"""Engines on GPUs: one alone over NCCL, several that share one over gloo."""

import pytest
import torch

import workbench as wb
from tests.gpu import probe
from tests.train.small import net
from workbench.hosts import host
from workbench.plan.collective.codec import Codec
from workbench.plan.experiment.experiment import Synthetic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

GRAPH = wb.trace(net(), input_shape=(3, 8, 8))


@pytest.fixture(scope="module")
def one_gpu():
    """All engines see the first GPU alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CUDA_VISIBLE_DEVICES", host.probe().gpus[0].token)
        yield


@pytest.fixture(scope="module", params=[1, 2])
def cluster(request, one_gpu, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs")
    with wb.Cluster(request.param, directory=directory, timeout=60.0) as cluster:
        yield cluster


def hybrid(cluster) -> wb.Plan:
    return wb.Plan.hybrid(GRAPH, len(cluster)).with_batch_norm("synchronized")


def experiment(cluster, **fields) -> wb.Experiment:
    return wb.Experiment(
        plan=hybrid(cluster),
        data=Synthetic(samples=64),
        batch_size=16,
        optimizer=wb.SGD(lr=0.05, momentum=0.9),
        steps=3,
        **fields,
    )


def test_one_engine_has_nccl_and_two_on_one_gpu_have_gloo(cluster):
    found = cluster.call("tests.gpu.probe:place", experiment(cluster), module=net())
    backend = "nccl" if len(cluster) == 1 else "gloo"
    assert found == [("cuda", backend)] * len(cluster)
    assert {device.backend for device in cluster.devices} == {backend}


def test_a_rank_on_a_cpu_beside_one_on_a_gpu_talks_through_the_host(on_ranks):
    kinds, backends, found = zip(*on_ranks.seated(2, probe.mixed), strict=True)
    assert (kinds, backends) == (("cuda", "cpu"), ("gloo", "gloo"))
    assert found == ([3.0, 3.0, 3.0, 3.0, 1.0, 2.0, 1.0],) * 2


@pytest.mark.parametrize("plan", [wb.Plan.data_parallel, wb.Plan.hybrid])
def test_a_split_model_is_exact(cluster, plan):
    whole = plan(GRAPH, len(cluster)).with_batch_norm("synchronized")
    found = cluster.verify(whole, module=net())
    assert found.exact, found


@pytest.mark.parametrize("rounds", ["B", "B/K"])
def test_rounds_are_exact(cluster, rounds):
    found = cluster.verify(hybrid(cluster).with_rounds(rounds), module=net())
    assert found.exact, found


@pytest.mark.parametrize(
    "sync", [wb.Synchronous(), wb.Pipelined(width=3, warmup=1), wb.ParameterServer()]
)
def test_a_run_trains_and_says_what_it_holds(cluster, sync):
    run = cluster.train(experiment(cluster, precision="bf16", sync=sync), module=net()).wait()
    assert run.state == "finished"
    assert (run.metrics["gpu_bytes"] > 0).all()
    assert (run.metrics["peak_bytes"] >= run.metrics["tensor_bytes"]).all()


@pytest.mark.parametrize("sync", [wb.Synchronous(), wb.ParameterServer()])
def test_a_scale_that_overflows_is_found_on_the_gpu(cluster, sync):
    scale = wb.LossScale(init_scale=2.0**40, backoff_factor=2.0**-30)
    run = cluster.train(
        experiment(cluster, precision="fp16", loss_scale=scale, sync=sync), module=net()
    ).wait()
    assert run.state == "finished"
    (note,) = [note for note in run.notes if "updated nothing" in note]
    assert note.startswith("1 of 3 steps")
    assert note.endswith("it is 1024 now")


FEEDBACK = Codec(name="top_k", fraction=0.2, error_feedback=True)
LATE = wb.Pipelined(width=3, compensation="delay")


@pytest.mark.parametrize("then", [LATE, wb.Synchronous(), wb.ParameterServer()])
def test_what_a_checkpoint_brings_back_comes_to_the_gpu(cluster, then):
    """Gradients in flight, and the weights that delay compensation needs.

    Shown here alone: without a GPU, tests/train shows on which device they are put, and no values.
    """
    first = cluster.train(experiment(cluster, sync=LATE), module=net()).wait()
    on = experiment(cluster, sync=then).replace(steps=6)
    run = cluster.train(on, module=net(), resume=first).wait()
    assert run.state == "finished"
    assert run.metrics["step"].max() == 5


@pytest.mark.parametrize("sync", [LATE, wb.Synchronous(codec=FEEDBACK)])
def test_what_a_re_cut_brings_along_comes_to_the_gpu(cluster, sync):
    found = cluster.call("tests.gpu.probe:re_cut", experiment(cluster, sync=sync), module=net())
    assert found == [{"cuda"}] * len(cluster)


def test_memory_is_what_the_allocator_says(cluster):
    found = cluster.call("tests.gpu.probe:memory", experiment(cluster), module=net())
    for metered, allocated in found:
        assert metered == allocated
        assert 0 < metered[1] <= metered[0]
