from diversed.cli import main

main()
