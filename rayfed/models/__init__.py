"""Models, one per file, each a component with `build(image_shape, classes) -> nn.Module`.

A model maps images (N, C, H, W) in [0, 1] to logits (N, classes).
"""

TABLE: dict[str, str] = {
    "hf": "rayfed.models.hugging_face:HuggingFace",
    "lenet": "rayfed.models.lenet:LeNet",
    "crnn": "rayfed.models.crnn:CRNN",
    "cryptonet": "rayfed.models.cryptonet:CryptoNet",
    "lenet5": "rayfed.models.lenet5:LeNet5",
    "alexnet": "rayfed.models.alexnet:AlexNet",
    "convnet": "rayfed.models.convnet:ConvNet",
    "mlp": "rayfed.models.mlp:Mlp",
    "small_cnn": "rayfed.models.small_cnn:SmallCnn",
    "resnet10": "rayfed.models.resnet:ResNet10",
    "resnet18": "rayfed.models.resnet:ResNet18",
    "resnet20": "rayfed.models.resnet:ResNet20",
    "resnet32": "rayfed.models.resnet:ResNet32",
    "resnet34": "rayfed.models.resnet:ResNet34",
    "text_rnn": "rayfed.models.text_rnn:TextRnn",
    "text_transformer": "rayfed.models.text_transformer:TextTransformer",
    "timm": "rayfed.models.timm_models:Timm",
    "torchvision": "rayfed.models.torchvision_models:Torchvision",
    "unet": "rayfed.models.unet:Unet",
}
