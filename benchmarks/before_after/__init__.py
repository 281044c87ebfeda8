"""The ML-1M steps and the full softmax, before the kernels were fused and now."""
