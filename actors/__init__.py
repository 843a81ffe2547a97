"""Run federations on Ray: actors, pools and executors. Contains no algorithms."""
