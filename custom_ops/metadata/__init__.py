"""What a batch's attention and a speculative round need to know, computed on the device."""
