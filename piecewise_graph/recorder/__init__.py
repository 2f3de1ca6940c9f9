"""The third stage: a program and a bucket become a tape of captured graphs."""
