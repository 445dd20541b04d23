"""The order of a model's parameters: that of the modules of a cut model."""

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from workbench.plan.graph import Layer


class _Modules:
    """The modules of a model: what each holds itself, then its children, both as they came."""

    def __init__(self) -> None:
        self.own: dict[str, dict[str, str]] = {"": {}}
        self.children: dict[str, list[str]] = {"": []}

    def add(self, path: str) -> dict[str, str]:
        """What a module holds; it and those around it are there from now on."""
        if path not in self.own:
            around = path.rpartition(".")[0]
            self.add(around)
            self.children[around].append(path)
            self.own[path], self.children[path] = {}, []
        return self.own[path]

    def names(self, path: str = "") -> list[str]:
        """What a module and its children hold."""
        found = list(self.own[path].values())
        for child in self.children[path]:
            found += self.names(child)
        return found


def trainable_names(layers: Iterable["Layer"]) -> tuple[str, ...]:
    """Names of all parameters of these layers in the order of the cut model's modules."""
    modules = _Modules()
    chosen = [(layer, [w for w in layer.weights if w.trainable]) for layer in layers]
    aliases = {alias: w.name for _, weights in chosen for w in weights for alias in w.aliases}
    for layer, weights in chosen:
        modules.add(layer.name)
        mine = [(weight.name, weight.name) for weight in weights]
        borrowed = [pair for pair in aliases.items() if pair[0].startswith(f"{layer.name}.")]
        for path, name in [*borrowed, *mine]:
            module, _, leaf = path.rpartition(".")
            modules.add(module)[leaf] = name
    return tuple(dict.fromkeys(modules.names()))  # a tied weight stands where it comes first
