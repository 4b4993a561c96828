"""The op set as data: names, axes, attributes, shape rules; `Program` and its builder; what one step hands to a program."""
