package linearizability_test

import (
	"bytes"
	"debug/elf"
	"encoding/binary"
	"fmt"
	"os"
	"strings"
)

// skewable reports that this platform can skew a process's clock.
const skewable = true

// skew moves the wall clock of this process by some seconds. Go reads the time with the kernel's function in the vDSO,
// in the process's own memory. skew replaces it by code that calls the kernel and adds the seconds.
func skew(seconds int64) error {
	base, size, err := vdso()
	if err != nil {
		return err
	}
	mem, err := os.OpenFile("/proc/self/mem", os.O_RDWR, 0)
	if err != nil {
		return err
	}
	defer mem.Close()
	image := make([]byte, size)
	if _, err := mem.ReadAt(image, base); err != nil {
		return fmt.Errorf("read the vDSO: %w", err)
	}
	file, err := elf.NewFile(bytes.NewReader(image))
	if err != nil {
		return fmt.Errorf("read the vDSO: %w", err)
	}
	symbols, err := file.DynamicSymbols()
	if err != nil {
		return fmt.Errorf("read the vDSO: %w", err)
	}
	for _, s := range symbols {
		if s.Name == "__vdso_clock_gettime" {
			// an offset in an image of a few pages
			if _, err := mem.WriteAt(clockGettime(seconds), base+int64(s.Value)); err != nil {
				return fmt.Errorf("change the vDSO: %w", err)
			}
			return nil
		}
	}
	return fmt.Errorf("the vDSO has no clock_gettime")
}

// clockGettime returns machine code: clock_gettime(2), plus the seconds for CLOCK_REALTIME.
func clockGettime(seconds int64) []byte {
	code := []byte{
		0xb8, 228, 0, 0, 0, // mov eax, SYS_clock_gettime
		0x0f, 0x05, // syscall
		0x85, 0xff, // test edi, edi
		0x75, 19, // jnz out
		0x85, 0xc0, // test eax, eax
		0x75, 15, // jnz out
		0x48, 0xb8, // mov rax, seconds
	}
	code = binary.LittleEndian.AppendUint64(code, uint64(seconds)) // two's complement
	return append(
		code,
		0x48, 0x01, 0x06, // add [rsi], rax
		0x31, 0xc0, // xor eax, eax
		0xc3, // out: ret
	)
}

// vdso returns the address and the size of the vDSO.
func vdso() (base, size int64, err error) {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return 0, 0, err
	}
	for line := range strings.Lines(string(maps)) {
		if strings.HasSuffix(strings.TrimSpace(line), "[vdso]") {
			var end int64
			if _, err := fmt.Sscanf(line, "%x-%x", &base, &end); err != nil {
				return 0, 0, err
			}
			return base, end - base, nil
		}
	}
	return 0, 0, fmt.Errorf("the process has no vDSO")
}
