"""What `probe` tries, one module per part of the kernel. Each trial uses the calls of the real build."""
