"""The order of a split model's parameters: that of its modules, as `state_dict` has them."""

from collections.abc import Iterable, Sequence


def trainable_names(
    layers: Iterable[tuple[str, Sequence[tuple[str, tuple[str, ...]]]]],
) -> tuple[str, ...]:
    """The names of layers' trained parameters, in the order of a split model's modules.

    Args:
        layers: each layer's name, and (name, further names) of each of its trained parameters.
    """
    modules = _Modules()
    chosen = list(layers)
    aliases = {alias: name for _, weights in chosen for name, others in weights for alias in others}
    for layer, weights in chosen:
        modules.add(layer)
        mine = [(name, name) for name, _ in weights]
        borrowed = [pair for pair in aliases.items() if pair[0].startswith(f"{layer}.")]
        for path, name in [*borrowed, *mine]:
            module, _, leaf = path.rpartition(".")
            modules.add(module)[leaf] = name
    return tuple(dict.fromkeys(modules.names()))  # a tied weight has its first place


class _Modules:
    """The modules of a model: each one's weights, then its children, in order of appearance."""

    def __init__(self) -> None:
        self.own: dict[str, dict[str, str]] = {"": {}}
        self.children: dict[str, list[str]] = {"": []}

    def add(self, path: str) -> dict[str, str]:
        """The weights of a module, which is added with the modules around it if it is new."""
        if path not in self.own:
            around = path.rpartition(".")[0]
            self.add(around)
            self.children[around].append(path)
            self.own[path], self.children[path] = {}, []
        return self.own[path]

    def names(self, path: str = "") -> list[str]:
        """The weights of a module and its children."""
        found = list(self.own[path].values())
        for child in self.children[path]:
            found += self.names(child)
        return found
