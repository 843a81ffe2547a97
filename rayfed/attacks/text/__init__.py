"""Attacks on texts: what they rebuild is a text in the form of an image, its tokens' numbers as bytes."""
