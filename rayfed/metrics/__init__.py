"""Metrics of the similarity between reconstructions and true samples, each declared as a `Metric`."""

TABLE = {
    "mse": "rayfed.metrics.images:MSE",
    "psnr": "rayfed.metrics.images:PSNR",
    "ssim": "rayfed.metrics.images:SSIM",
    "lpips_alex": "rayfed.metrics.learned:LPIPS_ALEX",
    "lpips_vgg": "rayfed.metrics.learned:LPIPS_VGG",
    "bp_ki": "rayfed.metrics.bayesian:BP_KI",
    "bp_ki_posterior": "rayfed.metrics.bayesian:BP_KI_POSTERIOR",
    "noise_ratio": "rayfed.metrics.learned:NOISE_RATIO",
    "token_accuracy": "rayfed.metrics.texts:TOKEN_ACCURACY",
    "rouge1": "rayfed.metrics.texts:ROUGE_1",
    "rouge2": "rayfed.metrics.texts:ROUGE_2",
    "rougeL": "rayfed.metrics.texts:ROUGE_L",
    "feature_accuracy": "rayfed.metrics.records:FEATURE_ACCURACY",
    "top1": "rayfed.metrics.top:TOP_1",
    "top3": "rayfed.metrics.top:TOP_3",
    "top5": "rayfed.metrics.top:TOP_5",
    "above_baseline": "rayfed.metrics.guessing:ABOVE_BASELINE",
    "above_public": "rayfed.metrics.guessing:ABOVE_PUBLIC",
    "identified": "rayfed.metrics.guessing:IDENTIFIED",
    "mask_iou": "rayfed.metrics.masks:MASK_IOU",
    "label_accuracy": "rayfed.metrics.labels:LABEL_ACCURACY",
}
"""Name -> location of its `Metric` (module:attribute), in the order of columns."""
