import torch

from dbsl.model import build_model
from experiments.benchmarks import operators
from tests.unit.cluster.test_counts import bare_step


def test_the_benchmark_of_operators_counts_those_of_a_step_and_views_apart():
    found = operators.count("test_resnet", 16, "no", "digits")
    model = build_model("test_resnet", 10, (16,))
    convolutions = sum(isinstance(module, torch.nn.Conv2d) for module in model.modules())
    a_step = {name: n / operators.STEPS for name, n in found.computing.items()}
    assert a_step["convolution"] == a_step["convolution_backward"] == convolutions
    assert a_step["_fused_sgd_"] <= 2  # groups with and without weight decay
    assert not {"detach", "view", "t", "empty_like"} & set(found.computing)
    bare = bare_step().computing.total()
    assert bare <= sum(a_step.values()) <= bare + 35
