"""HSTU, FuXi and SASRec, and the heads on top. No word of ranks, buffers or servers."""
