"""Define a user's own model for `user_model.yaml`. As a script, write the scenario's small Parquet file."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Net(nn.Module):
    """Two convolutions and a linear layer. rayfed sets `image_shape` and `classes` from the data."""

    def __init__(self, image_shape: tuple[int, int, int], classes: int, width: int = 16) -> None:
        super().__init__()
        channels, height, w = image_shape
        self.features = nn.Sequential(
            nn.Conv2d(channels, width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
            nn.Conv2d(width, 2 * width, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(2 * width * (height // 4) * (w // 4), classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return logits (N, classes) for images (N, C, H, W)."""
        return self.head(torch.flatten(self.features(images), 1))


def write_parquet(path: str) -> None:
    """Write patches of rayfed's `photos` in the Hugging Face image layout, the format for your own data."""
    import json
    from io import BytesIO
    from pathlib import Path

    import pyarrow as pa
    import pyarrow.parquet as pq
    from PIL import Image

    from rayfed.registry import build

    data = build("datasets", "photos", {"size": 32, "train_samples": 160}).load()
    encoded = []
    for image in data.train_images:
        buffer = BytesIO()
        Image.fromarray(image.transpose(1, 2, 0)).save(buffer, "PNG")
        encoded.append({"bytes": buffer.getvalue(), "path": None})
    features = {"image": {"_type": "Image"}, "label": {"names": list(data.classes), "_type": "ClassLabel"}}
    table = pa.table({"image": encoded, "label": data.train_labels})
    metadata = {"huggingface": json.dumps({"info": {"features": features}})}
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table.replace_schema_metadata(metadata), path)


if __name__ == "__main__":
    from pathlib import Path

    write_parquet(str(Path(__file__).parent / "user_data" / "train.parquet"))
