"""Formats of word images, one per file; `rayfed.data.sets.words` combines them into a data set."""
