"""Chat and batch together, in virtual time: engine models under the product's own policy and under others."""
