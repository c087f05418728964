// A bundle (docs/bundles.md) from Go, by cgo on liblayerzero (docs/c-api.md):
//
//	make -C c && lz up
//	cd examples/go
//	CGO_CFLAGS=-I../../c CGO_LDFLAGS="-L../../c/build -Wl,-rpath,$PWD/../../c/build" go build -o run .
//	./run model.lzb
//
// It runs the bundle once, on inputs of float32 that are filled with 0, 0.25, 0.5 and 0.75 in turn, and prints its
// outputs and the kernels that served it.
package main

// #cgo LDFLAGS: -llayerzero
// #include <layerzero.h>
// #include <stdlib.h>
import "C"

import (
	"fmt"
	"os"
	"unsafe"
)

// failure is the library's error as one of Go's: its first line says what to do.
func failure(code C.lz_code, said *C.lz_error) error {
	if code == C.LZ_OK {
		return nil
	}
	return fmt.Errorf("%s: %s", C.GoString(C.lz_code_name(C.int32_t(code))), C.GoString(&said.message[0]))
}

// tensors puts what a bundle takes or gives into shared memory. The array itself lies in C's memory, where it may hold
// pointers; whoever asked for it frees it.
func tensors(client *C.lz_client, told *C.lz_bundle_tensor, count C.size_t) (*C.lz_tensor, error) {
	said := C.lz_error{struct_size: C.sizeof_lz_error}
	first := (*C.lz_tensor)(C.calloc(count+1, C.sizeof_lz_tensor))
	made := unsafe.Slice(first, count)
	for i, one := range unsafe.Slice(told, count) {
		if one.dtype != C.LZ_FLOAT32 {
			return first, fmt.Errorf("give a bundle of float32: %s is none", C.GoString(one.name))
		}
		made[i] = C.lz_tensor{struct_size: C.sizeof_lz_tensor, dtype: one.dtype, ndim: one.ndim, shape: one.shape}
		code := C.lz_alloc(client, C.size_t(one.nbytes), &made[i].data, &said)
		if err := failure(code, &said); err != nil {
			return first, err
		}
		for j := range numbers(made[i], one) {
			numbers(made[i], one)[j] = float32(j%4) / 4
		}
	}
	return first, nil
}

// numbers are those of a tensor.
func numbers(tensor C.lz_tensor, told C.lz_bundle_tensor) []float32 {
	return unsafe.Slice((*float32)(tensor.data), told.nbytes/4)
}

func run(path string) error {
	said := C.lz_error{struct_size: C.sizeof_lz_error}
	if C.lz_abi_version() != C.LZ_ABI_VERSION {
		return fmt.Errorf("build this program again: liblayerzero has another interface")
	}
	var client *C.lz_client
	if err := failure(C.lz_connect(nil, &client, &said), &said); err != nil {
		return err
	}
	defer C.lz_close(client)

	file := C.CString(path)
	defer C.free(unsafe.Pointer(file))
	var bundle *C.lz_bundle
	if err := failure(C.lz_bundle_open(client, file, nil, &bundle, &said), &said); err != nil {
		return err
	}
	defer C.lz_bundle_close(bundle)

	info := C.lz_bundle_about(bundle)
	inputs, err := tensors(client, info.inputs, info.input_count)
	defer C.free(unsafe.Pointer(inputs))
	if err != nil {
		return err
	}
	outputs, err := tensors(client, info.outputs, info.output_count)
	defer C.free(unsafe.Pointer(outputs))
	if err != nil {
		return err
	}

	call := C.lz_bundle_run_spec{
		struct_size:  C.sizeof_lz_bundle_run_spec,
		inputs:       inputs,
		input_count:  info.input_count,
		outputs:      outputs,
		output_count: info.output_count,
	}
	var report *C.lz_bundle_report
	err = failure(C.lz_bundle_run(bundle, &call, &report, &said), &said)
	defer C.lz_bundle_report_free(report)
	if err != nil {
		return err
	}
	for i, one := range unsafe.Slice(info.outputs, info.output_count) {
		fmt.Println(C.GoString(one.name), numbers(unsafe.Slice(outputs, info.output_count)[i], one))
	}
	for _, step := range unsafe.Slice(report.steps, report.step_count) {
		fmt.Println("by", C.GoString(step.kernel_id))
	}
	return nil
}

func main() {
	if len(os.Args) != 2 {
		fmt.Fprintln(os.Stderr, "usage: run FILE.lzb")
		os.Exit(2)
	}
	if err := run(os.Args[1]); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
}
