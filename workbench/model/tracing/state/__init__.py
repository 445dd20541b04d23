"""What Python code keeps, sets or writes while a module is traced."""
