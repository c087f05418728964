module example/layerzero

go 1.19
