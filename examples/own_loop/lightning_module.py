"""A Lightning module with an uneven loader; its base class scales the loss in `backward`.

    python examples/own_loop/lightning_module.py

The loss that `training_step` returns and logs is the process's own mean.
"""

import lightning
import torch
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

import dbsl
from dbsl.integrations.lightning import Uneven


class Classifier(Uneven, lightning.LightningModule):
    """A small classifier with a loss scaled to the joint batch."""

    def __init__(self, local_batch_sizes):
        super().__init__()
        self.local_batch_sizes = local_batch_sizes
        self.layers = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 2))

    def train_dataloader(self):
        """Return the loader; processes and their ranks are known by now."""
        x = torch.randn(400, 8, generator=torch.Generator().manual_seed(0))
        dataset = TensorDataset(x, (x.sum(1) > 0).long())
        loader = DataLoader(dataset, batch_size=4, shuffle=True)
        return dbsl.uneven(loader, self.local_batch_sizes)

    def training_step(self, batch, batch_idx):
        """Return this process's mean loss."""
        images, labels = batch
        return functional.cross_entropy(self.layers(images), labels)

    def configure_optimizers(self):
        """Return the optimizer."""
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def train(local_batch_sizes, epochs=3, **trainer):
    """Train and return the model; `local_batch_sizes` has a size for each process."""
    torch.manual_seed(0)
    model = Classifier(local_batch_sizes).to(torch.get_default_dtype())
    trainer = lightning.Trainer(
        max_epochs=epochs,
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=len(local_batch_sizes),
        strategy="ddp" if len(local_batch_sizes) > 1 else "auto",
        logger=False,
        enable_checkpointing=False,
        **trainer,
    )
    trainer.fit(model)
    return model


if __name__ == "__main__":
    train([1, 7])
