"""Sources of images of words, one format a file; `rayfed.data.sets.words` makes a data set of some of them."""
