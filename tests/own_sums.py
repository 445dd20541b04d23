"""Algorithms and codecs of one's own, as somebody would write them."""

import torch

from workbench.comm.algorithms.algorithm import Algorithm
from workbench.comm.codecs.coders import Coder
from workbench.comm.messages.flat import MessageRound


class Tree(Algorithm):
    """A binomial tree to the first rank, and back."""

    def rounds(self, flat, members, me):
        k, room = len(members), torch.empty_like(flat)
        distances = [1 << level for level in range((k - 1).bit_length())]
        for distance in distances:
            if me % (2 * distance) == distance:
                yield MessageRound(sends=((members[me - distance], flat),))
            elif me % (2 * distance) == 0 and me + distance < k:
                yield MessageRound(receives=((members[me + distance], room),), additions=len(flat))
                flat += room
        for distance in reversed(distances):
            if me % (2 * distance) == distance:
                yield MessageRound(receives=((members[me - distance], flat),))
            elif me % (2 * distance) == 0 and me + distance < k:
                yield MessageRound(sends=((members[me + distance], flat),))


class Star(Algorithm):
    """Everything to the first rank, which sends the sum to all; also through a codec."""

    def rounds(self, flat, members, me):
        others = members[1:]
        if me:
            yield MessageRound(sends=((members[0], flat),))
            yield MessageRound(receives=((members[0], flat),))
        elif len(members) > 1:
            rooms = flat.new_empty(len(others), len(flat))
            added = len(others) * len(flat)
            yield MessageRound((), tuple(zip(others, rooms, strict=True)), added)
            for room in rooms:
                flat += room
            yield MessageRound(tuple((other, flat) for other in others))

    def coded_rounds(self, flat, members, me, coding):
        others, n = members[1:], len(flat)
        if not others:
            return
        if me:
            (wire,) = coding.buffers([n])
            coding.encode(flat, wire)
            yield MessageRound(sends=((members[0], wire),))
            yield MessageRound(receives=((members[0], wire),))
        else:
            wire, *rooms = coding.buffers([n] * len(members))
            yield MessageRound((), tuple(zip(others, rooms, strict=True)), len(others) * n)
            for room in rooms:
                coding.add(room, flat)
            coding.encode(flat, wire)
            yield MessageRound(tuple((other, wire) for other in others))
        coding.decode(wire, flat)


class Sign(Coder):
    """The sign of each value, and their mean magnitude."""

    error_feedback = True
    inexact = "signs"

    def encoded_bytes(self, length):
        return 4 + length

    def encode(self, x, wire):
        wire[:4].view(torch.float32).copy_(x.abs().mean())
        wire[4:].view(torch.int8).copy_(x.sign())

    def decode(self, wire, out):
        out.copy_(wire[4:].view(torch.int8) * wire[:4].view(torch.float32))


class Half(Coder):
    """fp16 of values that it takes for smaller than 65504."""

    name, error = "half", 2.0**-10

    def encoded_bytes(self, length):
        return 2 * length

    def encode(self, x, wire):
        wire.view(torch.float16).copy_(x)

    def decode(self, wire, out):
        out.copy_(wire.view(torch.float16))
