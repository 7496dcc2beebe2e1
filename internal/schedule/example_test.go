package schedule_test

import (
	"fmt"
	"strings"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/schedule"
)

func ExampleParse() {
	s, err := schedule.Parse("*/30 * * * *", time.UTC)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(s.Next(time.Date(2026, 1, 1, 10, 10, 0, 0, time.UTC)))
	// Output: 2026-01-01 10:30:00 +0000 UTC
}

func ExampleParse_wrong() {
	_, err := schedule.Parse("0 25 * * *", time.UTC)
	before, after, _ := strings.Cut(err.Error(), ": it takes")
	fmt.Println(before)
	fmt.Println("it takes" + after)
	// Output:
	// parse schedule "0 25 * * *": the hour "25" is wrong (end of range (25) above maximum (23): 25)
	// it takes 0 to 23, for example "9" or "8-18"
}
