"""Where code runs: devices, collective backends, ports, and the operators that both platforms share."""
