"""What runs next: states, queue, admission, plan, loop, runner."""
