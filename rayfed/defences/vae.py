"""VAE: clients train on reconstructions of their images by their own variational autoencoder, with noise.

Source: Lin et al. 2022, "A Secure Federated Learning Mechanism for Data Privacy Protection", section IV.B, equations 5
to 8 and algorithm 1.
"""

from __future__ import annotations

from typing import Annotated, ClassVar

import torch
from pydantic import Field
from torch import Tensor

from rayfed.core import seeds
from rayfed.defences.base import MEASURED, Batch, DataMethod, Defence, Task
from rayfed.errors import UserError
from rayfed.models.vae import Autoencoder
from rayfed.privacy.sampling import sample_laplace
from rayfed.registry import component
from rayfed.samples import Modality


@component
class Vae(Defence):
    """Replace every image by its reconstruction, anew in every round, and add Laplace noise; labels are kept.

    In its first round, a client trains an autoencoder on all of its original images, before any other defence, and
    keeps it in its state. Empirical, whatever `epsilon` is: the noise protects the reconstructions, but the autoencoder
    is trained without protection. The paper is ambiguous about the normal disturbance: equation 5 lists it next to the
    data, equation 8 adds noise to the data. Here it is the random input of the decoder; `disturbance` selects the other
    reading. An image is reconstructed from its own code with a new random sample. Pixels are not clipped after the
    noise.
    """

    takes: ClassVar[tuple[Modality, ...]] = ("pixels", "records")

    hidden: Annotated[int, Field(ge=1)] = 256
    """Width of the encoder's first dense layer and of the decoder's."""
    latent: Annotated[int, Field(ge=1)] = 16
    """Size of the latent variable."""
    conditional: bool = False
    """Give encoder and decoder the label of each image, so that the autoencoder is conditioned on labels. Needs one
    class per sample."""
    epochs: Annotated[int, Field(ge=1)] = 50
    """Number of training epochs of the autoencoder."""
    batch_size: Annotated[int, Field(ge=1)] = 64
    """Batch size for training the autoencoder."""
    lr: Annotated[float, Field(gt=0)] = 3e-3
    """Learning rate of Adam for training the autoencoder."""
    disturbance: Annotated[float, Field(ge=0)] = 0.0
    """Standard deviation of normal noise on the encoder's input pixels in training; the target stays clean. With 1,
    this is the other reading of equation 5."""
    sensitivity: Annotated[float, Field(gt=0)] = 1.0
    """Sensitivity of a reconstructed pixel (range: 0 to 1). The scale of the Laplace noise is sensitivity / epsilon."""
    epsilon: Annotated[float, Field(gt=0)] = 10.0
    """The paper's privacy budget, for one pixel of one reconstruction. It does not bound the leakage of the client's
    images."""

    @property
    def has_latents(self) -> bool:
        """Return True, because the client trains the autoencoder on all of its samples, and the noise is random."""
        return True

    def transform_data(self, task: Task, batch: Batch) -> Batch:
        """Return the batch unchanged, as an exact autoencoder without noise would."""
        return Batch(batch.inputs, batch.labels)

    def wrap_data(self, next: DataMethod) -> DataMethod:
        """Replace the client's images by reconstructions of the client's autoencoder, with Laplace noise."""

        def data(task: Task) -> Batch:
            own = next(task)
            return Batch(self.noised(self.forged(task, own), task.generator), own.labels)

        return data

    @torch.no_grad()
    def forged(self, task: Task, batch: Batch) -> Tensor:
        """Return the client's autoencoder's reconstructions of a batch's images, (N, C, H, W), without noise.

        Raises `UserError` if the autoencoder is conditional and a label is not one class.
        """
        if self.conditional and (batch.labels.is_floating_point() or batch.labels.ndim != 1):
            raise UserError(
                "vae: `conditional` needs one class per sample, but these labels are numbers, mixtures or masks; "
                "remove `conditional`, or put vae before the defence that mixes labels"
            )
        network = self._network(task)
        draws = _normal((len(batch.inputs), self.latent), batch.inputs, task.generator)
        images: Tensor = network(batch.inputs, draws, batch.labels)
        return images

    def noised(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """Add Laplace noise to every pixel of the images (equations 7 and 8)."""
        return images + self.sensitivity / self.epsilon * sample_laplace(images.shape, generator).to(images)

    def _network(self, task: Task) -> Autoencoder:
        """Return the client's autoencoder from its state, or train it."""
        # Not the round's generator, so that the round and all its observed updates use the same autoencoder.
        generator = seeds.torch_generator(task.order, "vae")
        images = task.data.inputs
        with seeds.global_stream(task.order, "vae", "weights"):
            classes = task.classes if self.conditional else 0
            network = Autoencoder(tuple(images.shape[1:]), self.hidden, self.latent, classes).to(images.device)
        if self._state_key not in task.state:
            task.state[MEASURED] = {"autoencoder_loss": self._fit(network, task.everything, generator)}
            task.state[self._state_key] = {name: w.cpu() for name, w in network.state_dict().items()}
        network.load_state_dict(task.state[self._state_key])
        return network

    @torch.enable_grad()
    def _fit(self, network: Autoencoder, samples: Batch, generator: torch.Generator) -> float:
        """Train the autoencoder, and return the mean loss over the samples in the last epoch."""
        optimiser = torch.optim.Adam(network.parameters(), lr=self.lr)
        total = 0.0
        for _ in range(self.epochs):
            total = 0.0
            for index in torch.randperm(len(samples.labels), generator=generator).split(self.batch_size):
                batch = samples.rows(index)
                images = batch.inputs
                seen = images + self.disturbance * _normal(images.shape, images, generator)
                draws = _normal((len(images), self.latent), images, generator)
                optimiser.zero_grad()
                loss = network.loss(seen, images, draws, batch.labels)
                loss.backward()
                optimiser.step()
                total += len(images) * float(loss.detach())
        return total / len(samples.labels)

    @property
    def keeps_state(self) -> bool:
        """Return True, because the client keeps its autoencoder for later rounds."""
        return True

    @property
    def _state_key(self) -> str:
        """Key of the autoencoder in the client's state, different for each defence of a pipeline."""
        return f"autoencoder of {self}"


def _normal(shape: tuple[int, ...], like: Tensor, generator: torch.Generator) -> Tensor:
    """Sample normal numbers on the CPU, so that all devices get equal values."""
    return torch.randn(shape, generator=generator).to(like)
