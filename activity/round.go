package activity

import (
	"regexp"
	"strconv"
	"strings"
)

// loopRound matches the part of a step's key that a loop of a flow writes. It counts from 0.
var loopRound = regexp.MustCompile(`(?:^|/)each@([0-9]{1,9})/`)

// Round returns the round of a step in a loop of a flow, from 1; of nested loops all rounds, from the outer one, as in
// 3.2. It is empty outside of loops.
func Round(step string) string {
	var rounds []string
	for _, part := range loopRound.FindAllStringSubmatch(step, -1) {
		n, _ := strconv.Atoi(part[1]) // at most nine digits
		rounds = append(rounds, strconv.Itoa(n+1))
	}
	return strings.Join(rounds, ".")
}
