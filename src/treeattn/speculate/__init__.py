"""Speculative decoding: which draft tokens a target model accepts."""
