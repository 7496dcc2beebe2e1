package api

import (
	"reflect"
	"time"
)

var timeType = reflect.TypeFor[time.Time]()

// inUTC is v with every time in it put into UTC: the database driver gives times in the zone of the
// process. What v points to is not changed. Structs that are embedded have to be exported.
func inUTC(v any) any {
	if v == nil {
		return nil
	}
	return shift(reflect.ValueOf(v)).Interface()
}

// shift copies as far down as times may be.
func shift(v reflect.Value) reflect.Value {
	if v.Type() == timeType {
		return reflect.ValueOf(v.Interface().(time.Time).UTC())
	}
	switch v.Kind() {
	case reflect.Pointer:
		if v.IsNil() {
			return v
		}
		to := reflect.New(v.Type().Elem())
		to.Elem().Set(shift(v.Elem()))
		return to
	case reflect.Slice:
		if v.IsNil() || v.Type().Elem().Kind() == reflect.Uint8 {
			return v
		}
		to := reflect.MakeSlice(v.Type(), v.Len(), v.Len())
		for i := range v.Len() {
			to.Index(i).Set(shift(v.Index(i)))
		}
		return to
	case reflect.Struct:
		to := reflect.New(v.Type()).Elem()
		to.Set(v)
		for i := range v.NumField() {
			if v.Type().Field(i).IsExported() {
				to.Field(i).Set(shift(v.Field(i)))
			}
		}
		return to
	}
	return v
}
