"""What this machine gives a process: GPUs, CPU threads, memory. Asked before a replica starts; reserves nothing."""
