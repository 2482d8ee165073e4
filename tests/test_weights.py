import timm
import torch

from dbsl.weights import FlatWeights


def test_model_and_vector_are_one_memory_and_the_model_computes_as_before():
    torch.manual_seed(0)
    model = (
        timm.create_model("resnet18", num_classes=5).to(memory_format=torch.channels_last).eval()
    )
    images = torch.randn(2, 3, 32, 32)
    before = model(images)
    weights = FlatWeights(model)
    assert torch.equal(model(images), before)
    assert model.conv1.weight.is_contiguous(memory_format=torch.channels_last)
    weights.vector.zero_()
    assert all(not p.any() for p in model.parameters())


def test_vector_holds_parameters_and_running_statistics_but_no_integers():
    model = torch.nn.BatchNorm2d(4)
    assert FlatWeights(model).vector.tolist() == [1.0] * 4 + [0.0] * 4 + [0.0] * 4 + [1.0] * 4


def test_training_moves_the_vector_and_load_moves_the_model():
    model = torch.nn.Linear(2, 1)
    weights = FlatWeights(model)
    start = weights.vector.clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    torch.testing.assert_close(weights.vector, start - 0.1)
    weights.load(start)
    assert torch.equal(torch.cat([model.weight.flatten(), model.bias]), start)
