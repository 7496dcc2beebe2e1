package replica

import (
	"testing"
	"time"

	"github.com/lanekeeper/lanekeeper/internal/assert"
)

// A lag is the age of the newest position that the standby has replayed, whatever the age of its latest transaction.
func TestLagIsAgeOfReplayedPosition(t *testing.T) {
	t.Parallel()
	now := time.Now()
	hour := time.Hour
	ago := func(d time.Duration) time.Time { return now.Add(-d) }
	for name, test := range map[string]struct {
		marks       []mark // the last one is the primary's present position
		standby     position
		primaryDown bool
		atLeast     time.Duration
		atMost      time.Duration
		unknown     bool
	}{
		"idle primary": {
			marks: []mark{{ago(2 * time.Second), 7}, {now, 7}}, standby: position{Position: 7, SinceTransaction: &hour},
		},
		"all replayed": {
			marks: []mark{{ago(2 * time.Second), 7}, {now, 9}}, standby: position{Position: 12, SinceTransaction: &hour},
		},
		"stands still": {
			marks: []mark{{ago(9 * time.Second), 7}, {now, 9}}, standby: position{Position: 7},
			atLeast: 9 * time.Second, atMost: 10 * time.Second,
		},
		"first measurement": {
			marks: []mark{{now, 9}}, standby: position{Position: 7, SinceTransaction: &hour}, atLeast: hour, atMost: hour,
		},
		"nothing known": {
			marks: []mark{{now, 9}}, standby: position{Position: 7}, atMost: time.Second, unknown: true,
		},
		"primary down": {
			marks: []mark{{ago(5 * time.Second), 7}}, standby: position{Position: 7}, primaryDown: true,
			atLeast: 5 * time.Second, atMost: 6 * time.Second,
		},
		"another server": {
			marks: []mark{{ago(time.Second), 9}, {now, 3}}, standby: position{Position: 3, SinceTransaction: &hour},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var m lagMeter
			for _, n := range test.marks {
				m.add(n.at, n.position)
			}
			behind, known := m.behind(now, test.standby, !test.primaryDown)
			assert.Truef(t, behind >= test.atLeast && behind <= test.atMost && known != test.unknown,
				"%s behind, known %v; want %s to %s, unknown %v", behind, known, test.atLeast, test.atMost, test.unknown)
		})
	}
}

// A standby that stands still for a day does not use memory for each second.
func TestLagMeterIsBounded(t *testing.T) {
	t.Parallel()
	var m lagMeter
	began := time.Now().Add(-24 * time.Hour)
	for i := range 24 * 60 * 60 {
		m.add(began.Add(time.Duration(i)*time.Second), int64(i))
	}
	assert.Equal(t, maxPending, len(m.pending))
	behind, known := m.behind(time.Now(), position{Position: 5}, true)
	assert.Truef(t, known && behind >= 23*time.Hour, "%s behind, known %v; want about a day", behind, known)
}
