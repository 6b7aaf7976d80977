"""What computes: our fused packed blocks and the heads that follow them."""
