"""MoE experts with coded weights through the products of humming-kernels 0.1.19 (Apache-2.0)."""
