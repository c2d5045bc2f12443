// Nothing: the target needs a source, and is there for its precompiled header.
