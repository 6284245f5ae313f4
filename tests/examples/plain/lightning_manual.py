"""Train a small network by Lightning."""

import lightning
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

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
        self.model = nn.Sequential(*blocks)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 4)]

    def training_step(self, batch, _):
        inputs, targets = batch
        loss = nn.functional.mse_loss(self.model(inputs), targets)
        self.manual_backward(loss)
        self.clip_gradients(self.optimizers(), 1.0)
        self.optimizers().step()
        self.optimizers().zero_grad()
        self.lr_schedulers().step()
        self.print(f"step {self.global_step}  loss {loss.item():.4f}")


trainer = lightning.Trainer(
    max_steps=12,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
    accelerator="cpu",
    devices=1,
)
trainer.fit(Network(), loader)
