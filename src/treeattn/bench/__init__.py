"""Measuring: workloads, the machine's limits, rivals, and a timer that keeps them apart."""
