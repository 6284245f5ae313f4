"""Train a small network by Lightning, whose steps are those of a pipeline.

torchrun --nproc-per-node 2 examples/lightning_manual.py
"""

import lightning
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import zbpp

torch.set_num_threads(1)  # with other numbers of threads, sums round differently
lightning.seed_everything(0, verbose=False)
inputs = torch.randn(256, 16)
data = TensorDataset(inputs, inputs.roll(1, dims=1))
loader = DataLoader(data, batch_size=32, shuffle=True)


class Network(lightning.LightningModule):
    """Learns to roll its inputs by one."""

    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        blocks = [nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 16)) for _ in range(4)]
        self.pipeline = zbpp.Pipeline(
            nn.Sequential(*blocks),
            loss_fn=nn.functional.mse_loss,
            optimizer=lambda parameters: torch.optim.AdamW(parameters, lr=1e-2),
            schedule="ZBH1",
            n_microbatches=4,
            clip_grad_norm=1.0,
        )

    def configure_optimizers(self):  # noqa: D102
        (optimizer,) = self.pipeline.optimizers
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4)]

    def training_step(self, batch, _):  # noqa: D102
        result = self.pipeline.step(*batch)
        self.optimizers().step()  # finds no gradients, and counts the step
        self.lr_schedulers().step()
        self.print(f"step {self.global_step}  loss {result.loss:.4f}")


class Stages(SingleDeviceStrategy):
    """Processes are stages, not replicas: nothing is sharded; the first one writes."""

    is_global_zero = property(lambda self: self.lightning_module.pipeline.rank == 0)


trainer = lightning.Trainer(
    max_steps=12,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    strategy=Stages("cpu"),
)
trainer.fit(Network(), loader)
