"""The Ray layer: actors, pools and executors, without any algorithm."""
