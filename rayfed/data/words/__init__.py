"""Formats of word images, one a file; `rayfed.data.sets.words` combines them into a data set."""
