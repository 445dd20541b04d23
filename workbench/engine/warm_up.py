"""What an engine does before it stands in for another."""


def warm_up() -> None:
    """Does once, with a small model, what a rank does first.

    The first model that is traced in a process has torch import some 800 modules, which takes
    longer than all else between the loss of a rank and the next step.
    """
    import torch
    from torch import nn

    from workbench.model.trace import trace

    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Flatten(), nn.Linear(144, 10))
    trace(model, input_shape=(3, 8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model(torch.zeros(2, 3, 8, 8)).sum().backward()
    optimizer.step()
