"""VAE: clients train on images that their own variational autoencoder reconstructs, with noise.

Source: Lin et al. 2022, "A Secure Federated Learning Mechanism for Data Privacy Protection", section IV.B, equations 5
to 8 and algorithm 1.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed import seeds
from rayfed.defences.base import Batch, DataMethod, Defence, Task
from rayfed.models.vae import Autoencoder
from rayfed.privacy.sampling import laplace
from rayfed.registry import component
from rayfed.samples import Modality


@component
class Vae(Defence):
    """Replace every image by its reconstruction, anew in every round, and add Laplace noise; labels are kept.

    A client trains its autoencoder the first time that it works, on all of its images as they are, whatever defences
    come before, and keeps it in its state. Empirical, whatever `epsilon` says: the noise hides what is forged, and that
    is made by a network which saw the images without any protection. Where the paper leaves room: equation 5 puts the
    normal disturbance beside the data, where equation 8 adds noise to them, so it is read as the draw with which the
    decoder starts; `disturbance` is for anyone who reads a sum. An image is forged from its own code, with a new draw.
    Pixels are not clipped after the noise.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    hidden: Annotated[int, Field(ge=1)] = 256
    """Width of the first dense layer of the encoder, and of the decoder."""
    latent: Annotated[int, Field(ge=1)] = 16
    """Length of the latent variable."""
    epochs: Annotated[int, Field(ge=1)] = 50
    """Number of epochs of the autoencoder's training."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Batch size of its training."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Learning rate of Adam, which trains it."""
    disturbance: Annotated[float, Field(ge=0)] = 0.0
    """Deviation of normal noise on the pixels that the encoder sees in training, where the target stays clean; 1 is the
    other reading of equation 5."""
    sensitivity: Annotated[float, Field(gt=0)] = 1.0
    """Sensitivity of a forged pixel, which lies in [0, 1]; the Laplace noise has the scale sensitivity / epsilon."""
    epsilon: Annotated[float, Field(gt=0)] = 10.0
    """The paper's privacy budget, for one pixel of one forged image; it bounds nothing about the client's own."""

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Train on reconstructed images."""

        def data(task: Task) -> Batch:
            own = next(task)
            return Batch(self.noised(self.forged(task, own.inputs), task.generator), own.labels)

        return data

    @torch.no_grad()
    def forged(self, task: Task, images: Tensor) -> Tensor:
        """Return the reconstructions of images (N, C, H, W) by the client's autoencoder, before the noise."""
        network = self._network(task)
        images = network(images, _normal((len(images), self.latent), images, task.generator))
        return images

    def noised(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Return images with Laplace noise on every pixel (equations 7 and 8)."""
        return images + self.sensitivity / self.epsilon * laplace(images.shape, generator).to(images)

    def _network(self, task: Task) -> Autoencoder:
        """Return the client's autoencoder, from its state or newly trained."""
        # Not the round's generator: whatever is observed of the round comes from the same autoencoder.
        generator = seeds.torch_generator(task.order, "vae")
        images = task.data.inputs
        with seeds.global_stream(task.order, "vae", "weights"):
            network = Autoencoder(tuple(images.shape[1:]), self.hidden, self.latent).to(images.device)
        if self._state_key not in task.state:
            self._fit(network, task.everything.inputs, generator)
            task.state[self._state_key] = {name: w.cpu() for name, w in network.state_dict().items()}
        network.load_state_dict(task.state[self._state_key])
        return network

    @torch.enable_grad()
    def _fit(self, network: Autoencoder, images: Tensor, generator: torch.Generator) -> None:
        optimiser = torch.optim.Adam(network.parameters(), lr=self.lr)
        for _ in range(self.epochs):
            for index in torch.randperm(len(images), generator=generator).split(self.batch_size):
                batch = images[index.to(images.device)]
                seen = batch + self.disturbance * _normal(batch.shape, batch, generator)
                optimiser.zero_grad()
                network.loss(seen, batch, _normal((len(batch), self.latent), batch, generator)).backward()
                optimiser.step()

    @property
    def keeps_state(self) -> bool:
        """True, because the client keeps its autoencoder."""
        return True

    @property
    def _state_key(self) -> str:
        """Key of the autoencoder in the client's state: each defence of a pipeline has its own."""
        return f"autoencoder of {self}"


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Draw normal numbers on the CPU, for equal values on every device."""
    return torch.randn(shape, generator=generator).to(like)
