"""Trackers: TensorBoard, MLflow, W&B, and loggers of one's own."""
