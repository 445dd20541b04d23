"""A forward pass that writes into what the model holds is refused, whatever the values are."""

import copy
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from workbench.model import TraceError, trace


class Net(nn.Module):
    """Two layers, a deep-copied teacher of the first, a buffer; `update` runs in each pass."""

    def __init__(self, update):
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 3)
        self.teacher = copy.deepcopy(self.first)
        self.norm = nn.BatchNorm1d(6)
        self.register_buffer("count", torch.zeros(3))
        self.update = update

    def forward(self, x):
        self.update(self)
        return self.head(self.norm(self.first(x)) + self.teacher(x).detach())


@torch.no_grad()
def all_buffers(net):
    for buffer in net.buffers():
        buffer += 1


@torch.no_grad()
def clamps_that_clip_nothing(net):
    for parameter in net.parameters():
        parameter.data.clamp_(-100, 100)


@torch.no_grad()
def a_teacher_that_still_is_its_student(net):
    for of_teacher, own in zip(net.teacher.parameters(), net.first.parameters(), strict=True):
        of_teacher.lerp_(own, 0.1)


@torch.no_grad()
def several_at_once(net):
    torch._foreach_mul_(list(net.teacher.parameters()), 0.9)


def a_state_dict(net):
    net.teacher.load_state_dict(net.first.state_dict())


@torch.no_grad()
def the_table_of_parameters(net):
    net.first._parameters["weight"].copy_(F.normalize(net.first._parameters["weight"], dim=1))


def data_that_is_assigned(net):
    for parameter in net.parameters():
        parameter.data = parameter.data * 0.9


@torch.no_grad()
def an_argument_out(net):
    torch.mul(net.count.detach(), 2, out=net.count)


def a_vector_of_all(net):
    vector = nn.utils.parameters_to_vector(net.parameters())
    nn.utils.vector_to_parameters(vector * 0.99, net.parameters())


@torch.no_grad()
def what_is_drawn_again(net):
    for parameter in net.head.parameters():
        nn.init.zeros_(parameter)


@torch.no_grad()
def statistics_of_a_batch_norm(net):
    dict(net.norm.named_buffers())["running_mean"].mul_(0.9)


@torch.no_grad()
def in_evaluation_alone(net):
    if not net.training:
        for buffer in net.teacher.parameters():
            buffer.mul_(1.0)


@pytest.mark.parametrize(
    ("update", "name"),
    [
        (all_buffers, "count"),
        (clamps_that_clip_nothing, "first.weight"),
        (a_teacher_that_still_is_its_student, "teacher.weight"),
        (several_at_once, "teacher.weight"),
        (a_state_dict, "teacher.weight"),
        (the_table_of_parameters, "first.weight"),
        (data_that_is_assigned, "first.weight"),
        (an_argument_out, "count"),
        (a_vector_of_all, "first.weight"),
        (what_is_drawn_again, "head.weight"),
        (statistics_of_a_batch_norm, "norm.running_mean"),
        (in_evaluation_alone, "teacher.weight"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_writes_are_refused_by_name(update, name):
    with pytest.raises(TraceError, match=re.escape(repr(name))):
        trace(Net(update), input_shape=(6,))


def test_the_line_that_writes_is_named():
    with pytest.raises(TraceError, match=r"in clamps_that_clip_nothing: parameter\.data\.clamp_"):
        trace(Net(clamps_that_clip_nothing), input_shape=(6,))


@torch.no_grad()
def copies(net):
    worked = [parameter.clone().clamp_(-1, 1) for parameter in net.parameters()]
    torch._foreach_mul_(worked, 0.5)
    scratch = torch.zeros(3)
    scratch += 1


def reads(net):
    dict(net.named_parameters())
    net.first.state_dict()


@pytest.mark.parametrize("update", [copies, reads])
def test_other_memory_may_be_written(update):
    assert len(trace(Net(update), input_shape=(6,)).outputs) == 1


def test_a_function_that_writes_into_the_module_that_was_given():
    def decays(_):
        with torch.no_grad():
            net.count.mul_(0.5)

    net = Net(decays)
    with pytest.raises(TraceError, match="writes into the weights of the module that was given"):
        trace(net, input_shape=(6,))


def test_what_no_operation_writes_is_seen_in_training():
    def copies_memory(net):
        own, other = (part._parameters["weight"] for part in (net.teacher, net.first))
        own.untyped_storage().copy_(other.untyped_storage())

    with pytest.raises(TraceError, match="computes in training something else"):
        trace(Net(copies_memory), input_shape=(6,))
